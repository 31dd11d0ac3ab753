"""Rooms: where the launches of a run meet, come and go, over links that break and hosts that die.

A member is one launch. Between meetings it needs no other. Meetings have numbers, and those that have taken meeting
N - 1 home meet in the room of number N: each takes a seat with a header, the room closes, each pulls the others'
messages, and the room gets one verdict. Seats are in order of names, so what is added up by them repeats bit for bit.

    channel.py  frames over TCP, sealed by the run's secret: everything below goes through them
    shelf.py    bytes that a rank shows to others by name, and fetching them by ranges
    point.py    the meeting point: members post what they are and have, and it decides (``megazero meet``)
    member.py   a launch's side: what a trainer calls

Nothing here knows what the bytes mean. Whoever has the secret is trusted. Bytes are sealed, not encrypted.
"""
