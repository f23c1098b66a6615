"""The names of arXiv's categories, and text without them.

A paper that says "[cs.CV]" in its margin tells a model its category. Only exact names of this list go, with their
neighbours left as they are: Math.PI, cs.Example and the brackets around a name stay.
"""

from __future__ import annotations

import re

_CATEGORIES = {
    "astro-ph": "CO EP GA HE IM SR",
    "cond-mat": "dis-nn mes-hall mtrl-sci other quant-gas soft stat-mech str-el supr-con",
    "cs": "AI AR CC CE CG CL CR CV CY DB DC DL DM DS ET FL GL GR GT HC IR IT LG LO MA MM MS NA NE NI OH OS PF PL RO SC "
    "SD SE SI SY",
    "econ": "EM GN TH",
    "eess": "AS IV SP SY",
    "math": "AC AG AP AT CA CO CT CV DG DS FA GM GN GR GT HO IT KT LO MG MP NA NT OA OC PR QA RA RT SG SP ST",
    "nlin": "AO CD CG PS SI",
    "physics": "acc-ph ao-ph app-ph atm-clus atom-ph bio-ph chem-ph class-ph comp-ph data-an ed-ph flu-dyn gen-ph "
    "geo-ph hist-ph ins-det med-ph optics plasm-ph pop-ph soc-ph space-ph",
    "q-bio": "BM CB GN MN NC OT PE QM SC TO",
    "q-fin": "CP EC GN MF PM PR RM ST TR",
    "stat": "AP CO ME ML OT TH",
}
TAGS = {f"{archive}.{subject}": None for archive, subjects in _CATEGORIES.items() for subject in subjects.split()}
_TAG = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, TAGS))})(?![\w-]|\.\w)")


def without_tags(text: str) -> tuple[str, int]:
    """The text without the names of categories, and how many there were."""
    return _TAG.subn("", text)
