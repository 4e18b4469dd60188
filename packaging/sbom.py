"""Write dist/netfold-VERSION.cdx.json: what an installed wheel brings, as CycloneDX. `make sbom`.

cyclonedx-py lists the Python packages of an environment that holds the wheel and nothing else. The libraries inside the
extension are none of these; they are added here, with the versions that the build used.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"


def main() -> int:
    wheels = [wheel for abi in (TAG, "abi3") for wheel in DIST.glob(f"netfold-*-{abi}-*_{platform.machine()}.whl")]
    if not wheels:
        print(f"sbom: no wheel for {TAG} on {platform.machine()} in dist/: make wheels", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="netfold-sbom-") as folder:
        bom = _installed(wheels[0], Path(folder))
    root = bom.metadata.component
    assert root is not None
    linked = [*_linked()]
    bom.components.update(linked)
    bom.register_dependency(root, [*_direct(bom, root), *linked])
    out = DIST / f"netfold-{root.version}.cdx.json"
    make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_to_file(str(out), allow_overwrite=True, indent=2)
    print(f"sbom: {out.relative_to(ROOT)}: {len(bom.components)} components")
    return 0


def _installed(wheel: Path, folder: Path) -> Bom:
    """The packages that pip installs with `wheel`, netfold itself as the main component."""
    python, listed = folder / "env" / "bin" / "python", folder / "installed.json"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "-qq", "install", str(wheel)], check=True)
    command = [
        sys.executable,
        "-m",
        "cyclonedx_py",
        "environment",
        "--pyproject",
        str(ROOT / "core" / "pyproject.toml"),
    ]
    subprocess.run([*command, "--mc-type", "library", "-o", str(listed), str(python)], check=True)
    bom: Bom = Bom.from_json(json.loads(listed.read_text()))  # type: ignore[attr-defined]  # made by its decorator
    return bom


def _direct(bom: Bom, root: Component) -> list[Component]:
    refs = {one.ref for each in bom.dependencies if each.ref == root.bom_ref for one in each.dependencies}
    return [component for component in bom.components if component.bom_ref in refs]


def _linked() -> list[Component]:
    """List what packaging/wheels.py compiles or links into the extension."""
    zig = Path(sysconfig.get_path("purelib")) / "ziglang"
    [nanobind] = (ROOT / ".venv-wheels" / "pythons").glob("cp311/lib/python*/site-packages/nanobind")
    [metadata] = nanobind.parent.glob("nanobind-*.dist-info")
    llvm = "Apache-2.0 WITH LLVM-exception"
    libcxx = _found(zig / "lib/libcxx/include/__config", r"define _LIBCPP_VERSION (\d+)(\d\d)(\d\d)")
    growth = nanobind / "ext/robin_map/include/tsl/robin_growth_policy.h"
    robin = _found(growth, r"_MAJOR (\d+)(?:.|\n)*_MINOR (\d+)(?:.|\n)*_PATCH (\d+)")
    headers = ROOT / ".venv-wheels/libfabric/rdma/fabric.h"
    fabric = _found(headers, r"FI_MAJOR_VERSION (\d+)\s*#define FI_MINOR_VERSION (\d+)")
    return [
        _component(
            "nanobind", importlib.metadata.Distribution.at(metadata).version, "BSD-3-Clause", "linked statically"
        ),
        _component("robin-map", robin, "MIT", "compiled into nanobind"),
        _component("libc++", libcxx, llvm, "linked statically, with libc++abi and libunwind"),
        _component("zig", importlib.metadata.version("ziglang"), "MIT", "its compiler_rt, linked statically"),
        _component("libfabric", fabric, "BSD-2-Clause OR GPL-2.0-only", "its headers; the library is the host's"),
    ]


def _component(name: str, version: str, license_expression: str, how: str) -> Component:
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        description=how,
        licenses=[LicenseFactory().make_with_expression(license_expression)],
        purl=PackageURL("pypi" if name == "nanobind" else "generic", None, name, version),
        bom_ref=f"{name}=={version}",
    )


def _found(file: Path, pattern: str) -> str:
    """The groups of `pattern` in `file`, leading zeros taken off: ("22", "01", "08") is 22.1.8."""
    match = re.search(pattern, file.read_text())
    assert match is not None, f"{file}: no {pattern}"
    return ".".join(str(int(part)) for part in match.groups())


if __name__ == "__main__":
    sys.exit(main())
