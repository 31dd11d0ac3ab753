"""Rooms: where the launches of a run meet, come and go, over links that may break and hosts that may die.

A member is one launch. Between meetings it knows no other. Meetings have numbers; members that have brought number N - 1
home meet in the room of number N: each takes a seat with a header, the room closes, each pulls the others' messages, and the
room gets one verdict. Seats are in order of names, so whatever is added up by them repeats bit for bit.

    channel.py  frames over TCP, sealed by the run's secret: everything below goes through them
    shelf.py    bytes that a rank shows to others by name, and who fetches them, by ranges
    point.py    the meeting point: members post what they are and have, and it decides (``megazero meet``)
    member.py   one launch's side: what a trainer calls

Nothing here knows what the bytes mean. Who is trusted is who has the secret; what crosses is sealed, not encrypted.
"""
