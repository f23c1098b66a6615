"""Runs and data sets in object storage: S3, Google, Azure, or a folder.

bucket moves objects, manifest lists an item's files and a bucket's items, snapshot says what is sent, push and pull
move items, upload sends a run while it trains. Needs the package obstore
(`pip install 'rung[s3]'`), which is imported when a bucket is opened.
"""
