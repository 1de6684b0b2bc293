from rope_cpu import machine


def test_the_last_cache_has_a_size():
    assert 2**18 <= machine.last_level_cache() <= 2**32
