"""The vocabulary of the appliance: frozen dataclasses and enums, standard library only, no I/O.

Every other package may import this one; it imports none of them.
"""
