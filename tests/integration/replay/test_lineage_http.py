"""Groups, lineage and exported trajectories over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.run import export
from headrace.run.lineage import FOLDER
from headrace_services.trainer.control.lineage_writer import LineageWriter
from tests.support.buffer import begin, make_group, make_trajectory
from tests.support.replay_service import config_of, serving


async def test_groups_their_lineage_and_their_trajectories_are_served(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    async with serving(config) as (http, replay):
        (lease,) = await replay.lease(await begin(replay, 3), 1)
        await replay.push(lease, make_trajectory(lease, 0))
        listed = (await http.get("/v1/groups", params={"state": ["queued", "open"]})).json()
        assert {group["id"]: group["state"] for group in listed} == {
            "e0-train-0": "open",
            "e0-train-1": "queued",
            "e0-train-2": "queued",
        }
        assert len((await http.get("/v1/groups", params={"limit": 2})).json()) == 2
        waiting = (await http.get(f"/v1/groups/{lease.group.id}/lineage")).json()
        assert (waiting["state"], waiting["step"]) == ("open", None)
        assert waiting["trajectories"][0]["ranges"] == [
            {"start": 0, "end": 4, "replica": "replica", "version": 0, "timeline": None}
        ]
        missing = await http.get("/v1/groups/e0-train-9/lineage")
        assert missing.status_code == 404
        assert "hold group 'e0-train-9'" in missing.json()["detail"]
        trained = make_group(9)
        LineageWriter(config.checkpoint_folder / FOLDER, "one").write(4, [trained], {trained.id: []})
        found = (await http.get("/v1/groups/e0-train-9/lineage")).json()
        assert (found["state"], found["step"], found["timeline"]) == ("trained", 4, "one")

        (line,) = (await http.get("/v1/export")).text.splitlines()
        back = export.from_line(line)
        assert back.trajectory.encode() == make_trajectory(lease, 0).encode()
        assert json.loads(line)["lineage"]["ranges"] == waiting["trajectories"][0]["ranges"]
        assert (await http.get("/v1/export", params={"state": "ready"})).text == ""
        assert (await http.get("/v1/export", params={"state": "lost"})).status_code == 422
