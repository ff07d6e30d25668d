"""A rank's memory while it loads: its own share and the largest tensor, whatever the size of the model."""


def test_a_rank_of_four_loads_within_its_share(pools, tmp_path):
    (saved,) = pools(1).run("tests.checkpoint.load_memory:save", output_dir=str(tmp_path))
    results = pools(4).run(
        "tests.checkpoint.load_memory:load",
        timeout=120.0,
        path=saved["path"],
        plan={"Distributed.mp_degree": 4},
        world=4,
    )
    limit = 1.2 * (saved["all"] / 4 + saved["largest"])
    for result in results:
        assert result["held"] < 1.05 * saved["all"] / 4  # norms and positions are everywhere
        assert result["held"] + result["besides"] <= limit, (result, saved)
        assert result["read"] <= saved["all"]
