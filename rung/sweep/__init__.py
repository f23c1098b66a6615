"""Many runs of one recipe: a sweep file becomes points, each point a run of the lab book.

space says what a point is, plan reads the sweep file and keeps what was planned, state says how each point stands and
who works on it, point does all there is to do for one of them, launch places points on this machine or on a cluster.
Nothing here imports torch: what is trained has processes of its own.
"""
