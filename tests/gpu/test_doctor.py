"""``gtrain doctor`` on a machine with a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from helpers import gtrain, ok


def test_the_report_names_the_devices_and_what_works_on_them(tmp_path: Path) -> None:
    facts = json.loads(ok(gtrain("doctor", "format=json", cwd=tmp_path, timeout=110)).stdout)
    count = torch.cuda.device_count()
    assert [gpu["name"] for gpu in facts["gpus"]["devices"]] == [
        torch.cuda.get_device_name(number) for number in range(count)
    ]
    assert all(0 < gpu["free"] <= gpu["memory"] for gpu in facts["gpus"]["devices"])
    assert facts["gpus"]["built_for"] == torch.version.cuda and facts["gpus"]["driver"] is not None
    assert facts["triton"]["error"] is None and facts["triton"]["value"]["compiled"] == count
    assert facts["strategies"]["ps"]["gpu"] and facts["strategies"]["single"]["gpu"]
    text = ok(gtrain("doctor", f"trainer.num_nodes={count + 1}", cwd=tmp_path, timeout=110)).stdout
    assert f"cuda:0           {torch.cuda.get_device_name(0)}, " in text
    assert f"NOTE: with trainer.accelerator=gpu, {count + 1} ranks share {count} GPU(s)" in text
