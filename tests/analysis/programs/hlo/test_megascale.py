"""Transfers between TPU slices, as libtpu 0.0.42 prints them."""

import pytest
from refusals import refuses

from lingvo_moe.analysis.programs.hlo.collectives import CollectiveUse, collective_use
from lingvo_moe.analysis.programs.hlo.instructions import HloError
from lingvo_moe.analysis.programs.hlo.module import parse_module

_PAIRS = "{{100001->200000},{200001->100000}}"


def _use(target, transfer="ALL_REDUCE"):
    frontend = (
        f'_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target={target},'
        f'_xla_megascale_transfer_type="{transfer}"'
    )
    return _read(f"frontend_attributes={{{frontend}}}, backend_config={{}}")


def _read(attributes):
    module = parse_module(f"""HloModule m, is_scheduled=true, num_partitions=4

ENTRY %main (x: f32[16,8]) -> token[] {{
  %x = f32[16,8]{{1,0:T(8,128)}} parameter(0)
  %after-all = token[] after-all()
  %send = (f32[16,8]{{1,0:T(8,128)}}, u32[], token[]) send(%x, %after-all), channel_id=4, {attributes}
  ROOT %send-done = token[] send-done(%send), channel_id=4, is_host_transfer=true
}}
""")
    send = module.entry.by_name["send"]
    return collective_use(send, module.entry, module.attributes)


@pytest.mark.parametrize(("target", "expected"), [
    ('"{1,2}x{0:3}"', ((0, 4), (1, 5), (2, 6), (3, 7))),
    ('"{2,12}x{0,3}"', ((4, 44), (7, 47))),
    ("{{100000,300000},{200001,400001}}", ((0, 8), (5, 13))),
    ("{{100000,100001,200000,200001}}", ((0, 1, 4, 5),)),
    (_PAIRS, ((1, 4), (5, 0))),
])  # fmt: skip
def test_devices_of_all_slices(target, expected):
    assert _use(target).devices == expected


@pytest.mark.parametrize(("transfer", "kind", "times"), [
    ("ALL_REDUCE", "all-reduce", 1),
    ("REDUCE_SCATTER", "reduce-scatter", 1),
    ("ALL_TO_ALL", "all-to-all", 1),
    ("ALL_GATHER", "all-gather", 3),  # the result has the operands of three slices
])  # fmt: skip
def test_kinds_and_bytes(transfer, kind, times):
    use = _use('"{1,2,3}x{0:3}"', transfer)
    devices = tuple((d, 4 + d, 8 + d) for d in range(4))
    assert use == CollectiveUse(kind, times * 16 * 8 * 4, 3, 4, devices=devices)


def test_a_permute_has_pairs():
    assert _use(_PAIRS, "ONE_TO_ONE") == CollectiveUse(
        "collective-permute", 16 * 8 * 4, 2, 2, devices=((1, 4), (5, 0))
    )


def test_other_sends_are_no_collectives():
    assert _read('frontend_attributes={_xla_host_transfer_rendezvous="print"}') is None


@refuses(HloError,
    (('"{1,2}x{0:3}"', "BROADCAST"), "send send: unknown type .* 'BROADCAST'; known are ALL_REDUCE"),
    (('"every device"',), "send send: cannot read the devices of .*every device"),
    (("{{100000,200000},{100001}}",), "cannot read the devices of"),
)  # fmt: skip
def test_unreadable_transfers(arguments):
    _use(*arguments)
