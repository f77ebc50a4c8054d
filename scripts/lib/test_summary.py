"""Sums up a ctest JUnit report: why tests were skipped, and "N passed, N failed, N skipped" as
the last line.

A second report is that of the failed ones, run again by themselves: those that passed there are
named as unsteady.
"""

import collections
import os
import re
import sys
import xml.etree.ElementTree as ElementTree


def cases_in(path: str) -> list[ElementTree.Element]:
    return list(ElementTree.parse(path).getroot().iter("testcase")) if os.path.exists(path) else []


def main(path: str, again: str | None = None) -> int:
    cases = cases_in(path)
    steadied = {case.get("name") for case in cases_in(again) if case.get("status") == "run"} if again else set()
    states = collections.Counter()
    reasons = collections.defaultdict(list)
    for case in cases:
        status = case.get("status")
        if status == "run":
            states["passed"] += 1
            for reason in re.findall(r"Skipped\n(.+)", case.findtext("system-out") or ""):
                reasons[reason.strip()].append(f"a case of {case.get('name')}")
        elif status in ("notrun", "disabled") and case.find("skipped") is not None:
            states["skipped"] += 1
            output = case.findtext("system-out") or ""
            said = re.search(r"Skipped\n(.+)", output) or re.search(r"(.+)", output)
            reasons[said.group(1).strip() if said else "no reason given"].append(case.get("name"))
        elif case.get("name") in steadied:
            states["passed"] += 1
            print(f"  unsteady: {case.get('name')} failed beside the others and passed by itself")
        else:
            states["failed"] += 1
            print(f"  failed: {case.get('name')}")
    for reason, names in sorted(reasons.items()):
        print(f"  skipped {len(names)}: {reason}")
        for name in names:
            print(f"      {name}")
    slowest = sorted(cases, key=lambda case: -float(case.get("time", 0)))[:12]
    print("  slowest: " + ", ".join(f"{case.get('name')} {float(case.get('time')):.1f} s" for case in slowest))
    print(f"{states['passed']} passed, {states['failed']} failed, {states['skipped']} skipped")
    return 1 if states["failed"] or not states["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
