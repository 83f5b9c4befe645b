from fedbranch.training.seeds import stream_seed


def test_streams_depend_on_each_part_of_their_place():
    seeds = {
        stream_seed(seed, number, client_id)
        for seed in range(3)
        for number in range(3)
        for client_id in ("a", "b")
    }
    assert len(seeds) == 18
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stream_seed(1, 23) != stream_seed(12, 3)
