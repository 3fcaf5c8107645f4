"""`detkern fingerprint`: the recorded digests, from C++ and from NumPy, and text that two machines can compare."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from detkern.cli import references
from detkern.cli.calls import CallSubject
from detkern.cli.fingerprint import fingerprint_of
from detkern.cli.main import main
from detkern.cli.subject import Subject, find
from detkern.cli.subjects import find_all
from detkern.operations.operation import Sample, replayed
from detkern.tensors import Device
from detkern.vocabulary.contracts import CONTRACTS
from detkern.vocabulary.dtypes import by_name

# A line changes only together with the version of the fingerprint or of the operands: a contract's bits never do.
RECORDED = """\
# detkern fingerprint 2, operands 1: contract or operation, type, SHA-256 of the results
fma                  f32  c25f361b3e752404c94488aae8226379678b2708b586f8b5570f211c5406a28c
fma                  f16  de94020b4dec4250fa405758722477b29ec7322c9bab2630f38dc6216d182976
fma                  bf16 85b432be88eb3ea5641eb206ef2edcc322cc005491895be219de94a6007ba20f
mma16                f16  6e6bda6a1bfbecdd7433bb284e43d747d161fb9a312fa70d402a5647b3097689
mma16                bf16 012537e3774f23aaabb6fb2c42b7e629ca3e92426a9503df66aaf71193993d33
mma8                 f16  20f17a75606fd5f2dfabc9b3d488a53272f97696a9850d565c29e9d255c5db6c
mma8                 bf16 c5608037f7000bef5a45db2438e84f6016bd9f8eff06ef1ef8c3160dfa1a9baf
tree                 bf16 e1db590774284029f886956190ab516cfa1852de430dd94e29b4567df58b6439
tree                 f16  f62d93c507abaecbaec1d8c9a8ff3a7570db9d6f3be179b46861960959f33556
tree-mma16           bf16 c3ee6047bfd518d1c1c2cdb8ba03cc3d5ca376f42661815d4090a37e80cf56be
tree-mma16           f16  68baceaeb53d5bc080688917ef5448048405183afa1ecda05d453e2a3bd0ab5f
fp8-block128         e4m3 34dbd85f4faaecdf762a9415073872888e25ac15acae13c340587037b6c0b55f
fp8-block128         e5m2 694d4d4297be2ebd95ee586d13db683e2cdb7f4108773d675a2ec08383d39cec
bias_gradient        f32  2865d9eb06ecb2635d228b6bd39246d69e8f8956fc6033f1698d2fe903aefb8e
bias_gradient        f16  f625a16c9e2d2d23b6e73f3766af996bb6295e98bd63ad9d93282da6420c1b84
bias_gradient        bf16 0ec14a26af2e339ccfb2360c0a9ed153d2c3fa9e64c04ea059dd01f611477072
sum                  f32  95220a0c9a4927baafeccb85856ce5a174da641140c38de3e413ea17d932ffd2
sum                  f16  6e22405db0f392089144d5be5e394bec2e1e2eae45455ac167cb6b5998cba264
sum                  bf16 15ecd5e987760a38bc0af3bda1215d50e159bb8e175b713a220ef39cf5cd7757
mean                 f32  2bacf33bef2a0749d0ae0a75dd212210158161874f730d7453da1e467d51f7d9
mean                 f16  02c1ea5f7de962fccfc82bb49c0ec912eb2b96d629937b0e5ada529cc47e3df3
mean                 bf16 304c2d012e686e8fea3bd37f317cc097af3dae87d8027b8f487567fe2906563e
mean_square          f32  d223c42379f95f51019b1d59931608fc13aa5e35bf0e732d9b89f79854935820
mean_square          f16  6c665407d8996feda9cc7f9fb6c7687e0c616bf415a069f2c6b4c804ddf518d8
mean_square          bf16 898de860f5cdaa9a47a59fdf807a2d6fab012715c35d7219198edfea6e296039
softmax              f32  fad4fe9fd167ae308795594b3cbc8be69e062e4826fee2e7ebce597e7914e875
softmax              f16  58b4e133ec383a330208a3812f59712f7777e81196a45def9d23eae24e9e461d
softmax              bf16 57b3361b8baf446e4cd5974c2e4e0c998b20465a7dc75477583352bf5e5cf867
log_softmax          f32  d7726dc53166aa48fa1e5932fe3d2fcff6c61004654d4b5ab6abcbee51e012f1
log_softmax          f16  979f78c355ce22fcee14f03163273e3bb8c2f6ca52a99cc7105a088dbf63d94b
log_softmax          bf16 48f59fd7982826ccd387a492debf8af6dd82e066f5b2f740e2398db4ef2a8899
sum_backward         f32  d3e013443f7eaea6bf473434383e2fead3a050757f0fd638ab21821f7825683d
sum_backward         f16  a54ec780c1d3c995ec7520216c983e228d200efd7da6c8513fc1339487112eb2
sum_backward         bf16 02d369c9515875d360a13d6a741877a7065b8bf69a5af46c1249e955ff8021f3
mean_backward        f32  dbb100d466fe3e8108a5134ba23e4ce24ab4fdcafc726bf33876c322fdadd689
mean_backward        f16  30899d855e8fdba0db23706ae79219973eb875a3b578909f1b67b2cc756e5733
mean_backward        bf16 7c7bebd1fbfe3feb9d4308fee86eac87cad6bb8f92999ac172d82e44883173fd
mean_square_backward f32  e2ddb60e86daa9be66f9c5c54a5ee899f5afd9f495a913a46383344eb0939a37
mean_square_backward f16  086b8bc231c5d140f86d070c3b06f322f81041f58c25a46d41d188c4ea6c939e
mean_square_backward bf16 32d9dd251cc3460719b16c52ca620551bc65fc902fa86256d78ea63e8f19bca3
softmax_backward     f32  9c23b68fec5a61751ad2831d0e064000e703c40b418405f0d6914c2503a9e47c
softmax_backward     f16  f763c840fdc44c097c6b5034837ab979674c05460979ecc34a517e0650510abc
softmax_backward     bf16 c20c3b957f8032c8ab50714ad00b9ccd7595309716b809d3ceb4a378833f8924
log_softmax_backward f32  c52bbe13e5497627b0afb55c2198fa6d7e8d263c6d808aa424aa36007a1ad559
log_softmax_backward f16  1584f989d55f78c4fd48c60c4a8ba86b0dbe4416c127910f3e269da2de33de8c
log_softmax_backward bf16 493b4ab07c6d68cdefa089d7ad6621b41e4086f57961149e747e60afdaeaca3d
cumsum               f32  48932a10bff19297003f064da80142be465de5f60b177c450817650ff649d610
cumsum               f16  e899bc6b8eb198b2d3b99b5ecf917244bf4daa99f993443998ed7793df24602e
cumsum               bf16 fc7d7c2f93ade20b20d0e8f6a81f827be6aae4c0c0fe9032f3ca9a9a812589a4
cumsum_backward      f32  bf9545092f5160fdf8da3dc00584e014b177fc40b64417b29aa82c8936632775
cumsum_backward      f16  03989d3c8ed76f191bb916c56bc3993a28428f4f277c7223bb3dbca18e5df1b3
cumsum_backward      bf16 dc09134686627e2d600126a7110352caa7179a1ab9bfd7e993ec5530542e89c3
scatter_sum          f32  8da3984f1a41e5708f088a0fd7f99fad8d14903b3303e0c143fc4ea3e300444b
scatter_sum          f16  e08937a4f22197f79cd4722947ae179490ba0fe9ad6e8ce1b836ceca707f2aa9
scatter_sum          bf16 76acc82b72544806e0e13210e3e421b5597c2d7fc78befe20e77603438b54394
linear_logp-fma      f32  8af06db47b5bfb892206ba722d05d943a79a6127d9ca4cde7f96718d529134d4
linear_logp-fma      f16  818f88eb62619c7c78cfe6d95973945595d961dc8b59b73e4e124d7f74d4db31
linear_logp-fma      bf16 8a86521cecbbe1e086cb4dd88037748ca6769889e3524277fbd7fe4ef1041401
linear_logp-mma16    f16  2ab5fa121ac5a4fc8dfc281a992890ebcc952a8fac09c3b4981f0269eb193053
linear_logp-mma16    bf16 53321aab5304905e0f150a8ecb8cc29d1c74c2b61e0a6f5e548d1f518ac31fcb
linear_logp_merge    f32  f41dba01f84745987f9b0cd5fcecfacfe4db148e0a743b974fc5be7dd3a2a963
linear_logp_delta-fma f32  812485b4c7f97f8aa1f643590767ed3049136f2e6632500e153a19e8b3e4cc29
linear_logp_delta-fma f16  22774a1d0ae3cf12795912f52c926a52b06cca6da406ef77c540d38a0d008516
linear_logp_delta-fma bf16 22e88a8d4f4b00460c7826137bc153a6a76aaf761f9be672230acbdfb9422108
linear_logp_delta-mma16 f16  72d227d0d4b271a3f537595240d51d694d3a49543375e7fa1d89a91089d3979f
linear_logp_delta-mma16 bf16 f45298c3f7aa5873f049b913182dc2786a68995e929aa239c08b4d16b190d0e1
"""


def _digest(contract: str, dtype: str) -> str:
    (line,) = [line for line in RECORDED.splitlines() if line.split()[:2] == [contract, dtype]]
    return line.split()[2]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bias_gradient", "f16"), ("softmax", "bf16"), ("scatter_sum", "f16"), ("mean_square_backward", "f32"),
        ("cumsum", "f16"), ("cumsum_backward", "f32"),
    ],
)  # fmt: skip
def test_the_replay_of_another_operation_gives_the_recorded_digests(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def result(subject: CallSubject, sample: Sample) -> np.ndarray:
        return replayed(subject.operation, sample)

    monkeypatch.setattr(CallSubject, "result", result)
    (subject,) = [s for s in find_all((), (Device("cpu"),), (), (name,)) if s.dtype == by_name(dtype)]
    assert fingerprint_of(subject) == _digest(name, dtype)


def test_the_recorded_digests() -> None:
    result = CliRunner().invoke(main, ["fingerprint"])
    assert result.exit_code == 0, result.output
    assert result.stdout == RECORDED


@pytest.mark.parametrize(("contract", "dtype"), [("mma16", "bf16"), ("tree", "f16")])
def test_the_numpy_replay_gives_the_recorded_digests(
    contract: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(subject: Subject, operands: Any, **arguments: Any) -> np.ndarray:
        with np.errstate(all="ignore"):
            return references.replay(subject, operands, **arguments)

    monkeypatch.setattr(Subject, "product", product)
    wanted = by_name(dtype)
    assert wanted is not None
    subject = Subject("cpu", Device("cpu"), CONTRACTS[contract], wanted)
    assert fingerprint_of(subject) == _digest(contract, dtype)


def test_one_bit_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    (subject,) = find(("cpu",), (), ("fma",))[-1:]
    product, spoiled = Subject.product, []

    def once(self: Subject, *arguments: Any, **options: Any) -> np.ndarray:
        result = product(self, *arguments, **options)
        if result.size and not spoiled:
            spoiled.append(True)
            result.view(f"u{result.itemsize}")[-1, -1] ^= 1
        return result

    monkeypatch.setattr(Subject, "product", once)
    assert fingerprint_of(subject) != _digest("fma", "bf16")


def test_json() -> None:
    result = CliRunner().invoke(main, ["fingerprint", "--contract", "mma16", "--json"])
    assert json.loads(result.stdout) == {
        "fingerprint": 2,
        "operands": 1,
        "results": [
            {"contract": "mma16", "dtype": "float16", "sha256": _digest("mma16", "f16")},
            {"contract": "mma16", "dtype": "bfloat16", "sha256": _digest("mma16", "bf16")},
        ],
    }


def test_filters() -> None:
    result = CliRunner().invoke(main, ["fingerprint", "--contract", "tree", "--device", "cpu", "--backend", "cpu"])
    lines = RECORDED.splitlines()
    assert CliRunner().invoke(main, ["fingerprint", "--contract", "tree", "--backend", "cpu"]).stdout == result.stdout
    assert result.stdout.splitlines() == [lines[0], *(line for line in lines if line.startswith("tree "))]
    result = CliRunner().invoke(main, ["fingerprint", "--device", "cuda:63"])
    assert result.exit_code == 2
    assert "--device cuda:63: not here" in result.stderr
    result = CliRunner().invoke(main, ["fingerprint", "--backend", "native", "--contract", "fma"])
    assert result.exit_code == 2
    assert "follows no contract" in result.stderr
