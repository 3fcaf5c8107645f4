"""Launches of kernels that take tensor maps, on a driver that only takes notes: parameters, attributes, streams."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import cu_driver
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")

from detkern import config
from detkern.cu import current, extended_launch, gemm_tile, geometry, launch, tile_choice
from detkern.cu.device import CudaDevice
from detkern.cu.extended_launch import ExtendedLaunch, LaunchFailure
from detkern.cu.gemm_tile import Load, Tile
from detkern.cu.geometry import Launch
from detkern.dispatch.backend import Execution
from detkern.errors import DeviceError
from detkern.operations.gemm.problem import GemmProblem, gemm_problem
from detkern.tensors import Device, TensorView
from detkern.vocabulary.contracts import MMA16, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import BF16, E4M3, F32, DType

DEVICE = Device("cuda", 1)
BOTH = (Load.K_MAJOR, Load.K_MAJOR)
FUNCTION = 77
A, B, OUT, BIAS = 0x10000, 0x20000, 0x30000, 0x40000


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = config.dependent_launch
    yield
    config.dependent_launch = before


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> cu_driver.Bindings:
    return cu_driver.install(monkeypatch, launch.PARAMS_BYTES)


def _views(m: int = 256, n: int = 512, k: int = 320, out_dtype: DType = BF16) -> tuple[TensorView, ...]:
    """x [m, k] and a weight [n, k], turned."""
    return (
        TensorView(A, (m, k), (k, 1), BF16, DEVICE),
        TensorView(B, (k, n), (1, k), BF16, DEVICE),
        TensorView(OUT, (m, n), (n, 1), out_dtype, DEVICE),
    )


def _problem(contract: Contract = MMA16, **sizes: Any) -> GemmProblem:
    return gemm_problem(contract, *_views(**sizes), None, False)


def _tile(contract: Contract = MMA16) -> Tile:
    return next(tile for tile in gemm_tile.tiles_for(contract, BF16) if tile.by_tma)


def _extended(tile: Tile | None = None, **sizes: Any) -> ExtendedLaunch:
    return ExtendedLaunch(FUNCTION, geometry.launch_for(_problem(**sizes), tile or _tile(), 132))


BLOCK = bytes(range(256)) * (launch.PARAMS_BYTES // 256 + 1)
PARAMS = BLOCK[: launch.PARAMS_BYTES]


def test_parameters_are_the_block_and_the_maps_in_order(bindings: cu_driver.Bindings) -> None:
    extended = _extended()
    extended(PARAMS, A, B, OUT, 0x1234)
    (one,) = bindings.launches
    assert (one.function, one.params) == (FUNCTION, PARAMS)
    assert [bindings.maps[number][2] for number in one.maps] == [A, B, OUT]
    assert [bindings.maps[number][3] for number in one.maps] == [
        [64, 256, 5, 1],
        [64, 512, 5, 1],
        [512, 256, 1, 1],
    ]
    chosen, made = extended.launch, one.configuration
    assert (made.gridDimX, made.gridDimY, made.gridDimZ) == (chosen.grid, 1, 1)
    assert (made.blockDimX, made.blockDimY, made.blockDimZ) == (chosen.threads, 1, 1)
    assert (made.sharedMemBytes, made.hStream) == (chosen.build.shared_bytes, 0x1234)


def test_an_output_that_the_kernel_writes_itself_has_no_map(bindings: cu_driver.Bindings) -> None:
    """Any map will do in its place; the block says that it is none."""
    extended = _extended(out_dtype=F32)
    extended(PARAMS, A, B, OUT, 0)
    (one,) = bindings.launches
    assert [bindings.maps[number][2] for number in one.maps] == [A, B, A]


def test_the_switch_sets_the_attribute_and_clears_it(bindings: cu_driver.Bindings) -> None:
    extended = _extended(m=_tile()["TILE_M"])
    for wanted in (True, False, True, False):
        config.dependent_launch = wanted
        extended(PARAMS, A, B, OUT, 0x1234)
        made = bindings.launches[-1].configuration
        assert made.numAttrs == len(made.attrs) == int(wanted)
        if wanted:
            (attribute,) = made.attrs
            assert attribute.id == "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
            assert attribute.value.programmaticStreamSerializationAllowed == 1


def test_tiles_below_one_another_are_launched_as_clusters_of_two(bindings: cu_driver.Bindings) -> None:
    for dependent in (True, False):
        config.dependent_launch = dependent
        extended = _extended(m=2 * _tile()["TILE_M"])
        assert extended.launch.cluster == 2
        extended(PARAMS, A, B, OUT, 0x1234)
        made = bindings.launches[-1].configuration
        assert made.numAttrs == len(made.attrs) == 1 + dependent
        assert made.attrs[0].id == "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"
        size = made.attrs[0].value.clusterDim
        assert (size.x, size.y, size.z) == (2, 1, 1)
        assert made.gridDimX % 2 == 0


def test_a_stream_has_one_configuration_and_maps_are_made_once(
    bindings: cu_driver.Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    extended = _extended()
    for _ in range(3):
        for stream in (1, 2):
            extended(PARAMS, A, B, OUT, stream)
    by_stream = {one.configuration.hStream: one.configuration for one in bindings.launches}
    assert len(bindings.launches) == 6
    assert len({id(one.configuration) for one in bindings.launches}) == len(by_stream) == 2
    assert len(bindings.maps) == 3
    # Streams and operands come and go; no more than a few are kept, and each launch still has its own.
    monkeypatch.setattr(extended_launch, "_KEPT", 4)
    for stream in range(100, 150):
        extended(PARAMS, A, B, OUT, stream)
        assert bindings.launches[-1].configuration.hStream == stream
        assert len(extended._configurations) <= 4
    for place in range(50):
        before = len(bindings.maps)
        extended(PARAMS, A + 256 * place, B, OUT, 1)
        assert bindings.launches[-1].maps[0] == (before if place else bindings.launches[0].maps[0])
        assert len(extended._maps) <= 4


def test_a_refusal_is_named(bindings: cu_driver.Bindings) -> None:
    extended = _extended()
    extended(PARAMS, A, B, OUT, 0)
    bindings.failure = cu_driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(LaunchFailure, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        extended(PARAMS, A, B, OUT, 0)


class Runtime:
    """CuPy's driver and runtime, of which a launch by TMA needs the current device alone."""

    class Fault(Exception):
        pass

    CUDADriverError = CUDARuntimeError = Fault
    device = 0

    def getDevice(self) -> int:
        return self.device

    def setDevice(self, index: int) -> None:
        self.device = index

    def ctxGetCurrent(self) -> int:
        return 1

    def streamIsCapturing(self, stream: int) -> bool:
        return False

    def launchKernel(self, *arguments: int) -> None:
        raise AssertionError("a launch by TMA goes through cuda-bindings")


class Function:
    ptr = FUNCTION


@pytest.fixture
def runtime(bindings: cu_driver.Bindings, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    fake = Runtime()
    for module in (current, launch):
        monkeypatch.setattr(module, "driver", fake)
        monkeypatch.setattr(module, "runtime", fake, raising=False)
    monkeypatch.setattr(current, "_captured", [])
    monkeypatch.setattr(launch, "describe", lambda index: CudaDevice(index, "fake", "", (9, 0), 132, "1"))
    monkeypatch.setattr(launch, "load_function", lambda *arguments: Function)
    return fake


def _allocate(size: int) -> TensorView:
    return TensorView(0xABC00, (size,), (1,), E4M3, DEVICE)


def _launch(
    contract: Contract = MMA16, tile: Tile | None = None, bias: TensorView | None = None, **sizes: Any
) -> Launch:
    a, b, out = _views(**sizes)
    problem = gemm_problem(contract, a, b, out, bias, False)
    chosen = tile_choice.choose(problem, (9, 0), 132) if tile is None else geometry.launch_for(problem, tile, 132)
    launch.launch(problem, a, b, out, bias, Execution(DEVICE, 0x1234, _allocate), None if tile is None else chosen)
    return chosen


def test_a_product_on_hopper_goes_through_the_extended_launch(bindings: cu_driver.Bindings, runtime: Runtime) -> None:
    bias = TensorView(BIAS, (512,), (1,), F32, DEVICE)
    for out_dtype in (BF16, F32):
        chosen = _launch(bias=bias, out_dtype=out_dtype)
        one = bindings.launches[-1]
        assert chosen.build.source == "mma_wgmma.cu"
        assert struct.unpack_from("<5Q", one.params) == (A, B, OUT, BIAS, 0)
        problem = gemm_problem(MMA16, *_views(out_dtype=out_dtype), bias, False)
        assert chosen.maps is not None
        assert (chosen.maps.out is not None) == (out_dtype == BF16)
        assert chosen.prefetch_bytes > 0
        assert one.params[40:] == launch.pack_params(problem, chosen.maps, chosen.prefetch_bytes)
        assert one.configuration.hStream == 0x1234
    assert runtime.device == 0, "the earlier device is current again"


def test_a_trees_scratch_is_in_its_parameters(bindings: cu_driver.Bindings, runtime: Runtime) -> None:
    chosen = _launch(TREE_MMA16, _tile(TREE_MMA16), k=65536)
    assert chosen.scratch_bytes > 0
    assert struct.unpack_from("<5Q", bindings.launches[-1].params)[4] == 0xABC00
    assert [bindings.maps[number][2] for number in bindings.launches[-1].maps] == [A, B, A], "it writes no boxes"


def test_a_plan_keeps_its_maps(bindings: cu_driver.Bindings, runtime: Runtime) -> None:
    a, b, out = _views()
    launches = launch.Launches(_problem())
    for _ in range(3):
        launches(_problem().m, (a, b, None), out, Execution(DEVICE, 0x1234, _allocate))
    assert len(bindings.launches) == 3
    assert len(bindings.maps) == 3
    assert len(launches.plans) == 1


def test_a_number_of_rows_is_launched_as_if_it_had_come_alone(bindings: cu_driver.Bindings, runtime: Runtime) -> None:
    """Parameters, maps and configuration; of few rows, of tiles that are swapped, and of other prefetch_bytes."""
    execution = Execution(DEVICE, 0x1234, _allocate)

    def launched(launches: launch.Launches, m: int) -> tuple[Any, ...]:
        a, b, out = _views(m=m, n=n, k=k)
        launches(m, (a, b, None), out, execution)
        plan, one = launches.plans.get(m), bindings.launches[-1]
        assert plan is not None
        seen.append((plan.swapped, plan.launch.prefetch_bytes))
        made = one.configuration
        about = (made.gridDimX, made.blockDimX, made.sharedMemBytes, made.hStream, made.numAttrs)
        return about, one.params, [bindings.maps[number] for number in one.maps]

    for n, k in ((512, 320), (8192, 14336), (4096, 7168)):
        seen: list[tuple[bool, int]] = []
        shared = launch.Launches(_problem(n=n, k=k))
        for m in (7, 8, 100, 139, 2, 1000, 64, 9999, 3, 128, 129, 40, 144):
            assert launched(shared, m) == launched(launch.Launches(_problem(m=m, n=n, k=k)), m)
        if k > 320:
            assert len({swapped for swapped, _ in seen}) == len({min(size, 1 << 16) for _, size in seen}) == 2, k


def test_a_tiles_parameters_are_those_of_each_number_of_rows() -> None:
    """Whichever came first: prefetch_bytes, whole boxes and m differ where rows are one tile, more or fewer."""
    sizes = {"n": 8192, "k": 14336}
    wide = next(tile for tile in gemm_tile.tiles_for(MMA16, BF16) if tile.table == "mma_wgmma" and not tile.shares)
    turned = next(tile for tile in gemm_tile.tiles_for(MMA16, BF16) if tile.by_tma and tile.swapped)
    facts = CudaDevice(1, "fake", "", (9, 0), 132, "1")
    for tile in (wide, turned):
        layout, asked = launch.Layout(_problem(m=300, **sizes), facts), set()
        for m in (tile["TILE_M"], 1000, tile["TILE_N"], tile["TILE_M"] - 1, tile["TILE_M"] + 1, 500):
            problem = _problem(m=m, **sizes)
            chosen = geometry.launch_for(problem, tile, 132)
            asked.add(chosen.prefetch_bytes)
            alone = launch.pack_params(geometry.oriented(problem, tile), chosen.maps, chosen.prefetch_bytes)
            assert layout.params(problem, chosen) == alone
        assert len(asked) == (1 if tile.swapped else 2)


def test_the_map_of_a_weight_is_made_once_for_a_tile(bindings: cu_driver.Bindings, runtime: Runtime) -> None:
    launches, tiles = launch.Launches(_problem()), set()
    for m in range(2, 600):
        a, b, out = _views(m=m)
        launches(m, (a, b, None), out, Execution(DEVICE, 0x1234, _allocate))
        plan = launches.plans.get(m)
        assert plan is not None
        tiles.add(plan.launch.tile)
    assert len(tiles) > 2
    assert sum(arguments[2] == B for arguments in bindings.maps) == len(tiles)


def test_plans_of_one_grid_have_one_configuration(bindings: cu_driver.Bindings, runtime: Runtime) -> None:
    launches = launch.Launches(_problem())
    for m in range(5000, 5040):
        a, b, out = _views(m=m)
        launches(m, (a, b, None), out, Execution(DEVICE, 0x1234, _allocate))
    made = {id(one.configuration): one.configuration for one in bindings.launches}
    assert len(made) == len({(one.gridDimX, one.blockDimX, one.sharedMemBytes) for one in made.values()}) < 10


def test_what_the_driver_answers_is_in_the_device_error(bindings: cu_driver.Bindings, runtime: Runtime) -> None:
    a, b, out = _views()
    launches = launch.Launches(_problem())
    launches(_problem().m, (a, b, None), out, Execution(DEVICE, 0x1234, _allocate))
    bindings.failure = cu_driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(
        DeviceError, match=r"cuda:1 reported CUDA_ERROR_ILLEGAL_ADDRESS at mma16 gemm of m=256, n=512, k=320"
    ):
        launches(_problem().m, (a, b, None), out, Execution(DEVICE, 0x1234, _allocate))
    assert runtime.device == 0


def test_the_real_bindings_take_the_configuration() -> None:
    """Without a driver a configuration can still be made, and says what was put in."""
    config.dependent_launch = True
    extended = _extended(m=_tile()["TILE_M"])
    made = extended._configure(0x1234, True)
    assert int(made.hStream) == 0x1234
    assert (made.gridDimX, made.blockDimX) == (extended.launch.grid, extended.launch.threads)
    assert made.numAttrs == 1
    assert made.attrs[0].id.name == "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
    assert made.attrs[0].value.programmaticStreamSerializationAllowed == 1
    assert extended._configure(0, False).numAttrs == 0
    pairs = _extended(m=2 * _tile()["TILE_M"])._configure(0, False)
    assert [attribute.id.name for attribute in pairs.attrs] == ["CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"]
    size = pairs.attrs[0].value.clusterDim
    assert (size.x, size.y, size.z) == (2, 1, 1)
