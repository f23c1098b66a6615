"""Runs and data sets in object storage: S3, Google, Azure, or a folder.

    bucket      a place that a URL names: objects in and out, with retries and plain sentences
    manifest    the list of an item's files; an item is there exactly when its manifest is
    snapshot    what of a run or a data set is sent, as of one moment
    push        an item to a place, or away from it
    pull        an item from a place
    parcel      what is being brought, until it is whole
    listing     what is at a place
    upload      a run that sends itself while it trains
    workers     several transfers at a time

Needs the package obstore (`pip install 'rung[s3]'`), which is imported when a place is opened.
"""
