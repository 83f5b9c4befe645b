"""Text from outside is short, printable, and the same in every run."""

from fedbranch.protocol.plain_text import one_line, shortened


def test_a_value_from_outside_is_described_briefly_and_the_same_every_time():
    assert shortened([0.5] * 10**6) == "[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, ...]"
    assert shortened(object()) == shortened(object()) == "<object object>"
    assert len(one_line("x" * 10**6)) == 300
