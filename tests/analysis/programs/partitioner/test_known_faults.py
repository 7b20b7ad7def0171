"""The detector names what XLA's partitioner computes wrongly in small modules, and nothing in similar ones.

Running these programs on random numbers showed which are wrong; tests/spmd/test_known_faults_compiled.py compiles them.
"""

import pytest

from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.analysis.programs.partitioner import known_faults as kf
from lingvo_moe.core.sharding import ShardingError

WHOLE = "{replicated}"
ROWS_2_OF_4 = "{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}"
NAME = 'metadata={op_name="jit(call)/call_exported/jit(<unnamed function>)/call_tensorflow/net/Op"}'


def _module(devices, operands, result):
    """A module of one instruction. An operand is (type, sharding), the result (type, text, sharding)."""
    parameters = "".join(
        f"  %p{i} = {what} parameter({i}), sharding={sharding}\n"
        for i, (what, sharding) in enumerate(operands)
    )
    names = ", ".join(f"%p{i}" for i in range(len(operands)))
    what, opcode, attributes, sharding = result
    return parse_module(
        f"HloModule jit_call, num_partitions={devices}\n\n"
        f"ENTRY %main (p: f32[]) -> {what} {{\n{parameters}"
        f"  ROOT %r = {what} {opcode}({names}), {attributes}, sharding={sharding}, {NAME}\n}}\n"
    )


def _kinds(module):
    return [fault.kind for fault in kf.known_faults(module)]


def _scatter(updates, of_updates, indices=WHOLE, target=WHOLE, devices=8, combine="add", made=""):
    """A scatter. `made`: an operation that makes sharded updates; '': the updates are a sharded parameter."""
    attributes = (
        "update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, "
        "index_vector_dim=1, to_apply=%combine"
    )
    what = f"f32[{updates},6]"
    text = f"""HloModule jit_call, num_partitions={devices}

%combine (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %c = f32[] {combine}(%x, %y)
}}

ENTRY %main (a: f32[4,6], i: s32[{updates}], u: {what}) -> f32[4,6] {{
  %a = f32[4,6] parameter(0), sharding={{replicated}}
  %i = s32[{updates}] parameter(1), sharding={{replicated}}
  %u = {what} parameter(2), sharding={{replicated}}
  %number = f32[] constant(1)
  %one = {what} broadcast(%number), dimensions={{}}, sharding={of_updates}
  %target = f32[4,6] copy(%a), sharding={target}
  %ids = s32[{updates}] copy(%i), sharding={indices}
  %cut = {what} copy(%u), sharding={of_updates}
  %made = {what} {made or "copy(%cut)"}, sharding={of_updates}
  ROOT %r = f32[4,6] scatter(%target, %ids, %made), {attributes}, sharding={target}, {NAME}
}}
"""
    return parse_module(text)


ONES = "add(%cut, %one)"
ROWS_8, ROWS_4 = "{devices=[8,1]<=[8]}", "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"
ROWS_2 = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"
COLUMNS = "{devices=[1,2,4]<=[8] last_tile_dim_replicate}"
IDS_8, IDS_4 = "{devices=[8]<=[8]}", "{devices=[4,2]<=[8] last_tile_dim_replicate}"


@pytest.mark.parametrize("module, is_wrong", [
    (_scatter(15, ROWS_8, made=ONES), True),
    (_scatter(15, ROWS_8, IDS_4, made=ONES), True),
    (_scatter(15, ROWS_4, IDS_4, made=ONES), True),  # Alike, but in copies.
    (_scatter(15, ROWS_8, IDS_8, made=ONES), False),
    (_scatter(15, ROWS_8, "{devices=[8]7,6,5,4,3,2,1,0}", made=ONES), False),
    (_scatter(16, ROWS_8, made=ONES), False),
    (_scatter(15, COLUMNS, made=ONES), False),
    # A tensor that the program itself shards is padded with zeros: they may be added, not multiplied.
    (_scatter(15, ROWS_8), False),
    (_scatter(15, ROWS_8, made="multiply(%cut, %one)"), False),
    (_scatter(15, ROWS_8, made="cosine(%cut)"), True),
    (_scatter(15, ROWS_8, combine="multiply"), True),
])  # fmt: skip
def test_scatter(module, is_wrong):
    assert _kinds(module) == [kf.SCATTER] * is_wrong


def test_scatter_of_updates_that_are_sent_first_is_left_out():
    """Updates that XLA reshards like the target: some of these are right, so the detector names none."""
    assert _kinds(_scatter(15, ROWS_2, target=COLUMNS, made=ONES)) == []


def _pooling(size, window, stride, low, high, sharding, of_input=None):
    results = (size + low + high - window) // stride + 1
    attributes = (
        f"window={{size=1x{window}x1 stride=1x{stride}x1 pad=0_0x{low}_{high}x0_0}}, "
        "select=%ge, scatter=%add"
    )
    what = f"f32[2,{size},3]"
    operands = [(what, of_input or sharding), (f"f32[2,{results},3]", sharding), ("f32[]", WHOLE)]
    return _module(2, operands, (what, "select-and-scatter", attributes, sharding))


MIDDLE = "{devices=[1,2,1]<=[2]}"


@pytest.mark.parametrize("module, is_wrong", [
    (_pooling(8, 2, 1, 0, 0, MIDDLE), True),
    (_pooling(8, 4, 2, 0, 0, MIDDLE), True),
    (_pooling(8, 4, 2, 0, 0, MIDDLE, of_input=WHOLE), True),
    (_pooling(8, 3, 1, 1, 1, MIDDLE), True),
    (_pooling(8, 4, 2, 1, 1, MIDDLE), False),  # The padding before the first window helps.
    (_pooling(8, 2, 2, 0, 0, MIDDLE), False),
    (_pooling(8, 2, 1, 0, 0, WHOLE, of_input=MIDDLE), False),
    (_pooling(8, 2, 1, 0, 0, "{devices=[2,1,1]<=[2]}"), False),
    (_pooling(8, 6, 2, 1, 2, MIDDLE), False),  # Larger than a part.
])  # fmt: skip
def test_gradient_of_max_pooling(module, is_wrong):
    assert _kinds(module) == [kf.POOLING] * is_wrong


def _kernel_gradient(image, of_image, results, of_results, padding, stride=1, devices=8, batch=2):
    """The kernel gradient of a convolution of [batch, rows, features]; image and results are (rows, features)."""
    kernel = padding[0] + image[0] + padding[1] - (results[0] - 1) * stride
    attributes = (
        f"window={{size={results[0]} pad={padding[0]}_{padding[1]} rhs_dilate={stride}}}, "
        "dim_labels=f0b_i0o->0bf"
    )
    operands = [
        (f"f32[{batch},{image[0]},{image[1]}]", of_image),
        (f"f32[{batch},{results[0]},{results[1]}]", of_results),
    ]
    what = f"f32[{kernel},{image[1]},{results[1]}]"
    return _module(devices, operands, (what, "convolution", attributes, WHOLE))


IDLE = "{devices=[1,4,1,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"
WITH_BATCH = "{devices=[2,4,1]<=[8]}"
WITH_FEATURES = "{devices=[1,4,2]0,4,1,5,2,6,3,7}"
BATCH_ALONE = "{devices=[2,1,1,4]<=[8] last_tile_dim_replicate}"
ALL_ROWS = "{devices=[1,8,1]<=[8]}"
BATCH_ROWS_IDLE = "{devices=[2,2,1,2]<=[8] last_tile_dim_replicate}"


@pytest.mark.parametrize("operands, is_wrong", [
    (((16, 2), IDLE, (16, 2), IDLE), True),
    (((16, 2), ALL_ROWS, (16, 2), ALL_ROWS), False),
    (((16, 2), WITH_BATCH, (16, 2), WITH_BATCH), False),
    (((16, 2), BATCH_ROWS_IDLE, (16, 2), BATCH_ROWS_IDLE), True),
    (((16, 2), IDLE, (16, 2), WHOLE), False),
    # The larger operand decides, the image if they are alike: the results' features are sharded over
    # the other axis, then the input's are.
    (((16, 2), IDLE, (16, 4), WITH_FEATURES), False),
    (((16, 2), IDLE, (16, 2), WITH_FEATURES), True),
    (((16, 4), IDLE, (16, 2), WITH_FEATURES), True),
    (((16, 2), WITH_FEATURES, (16, 4), IDLE), True),
    (((16, 4), WITH_FEATURES, (16, 2), IDLE), False),
    (((16, 2), IDLE, (16, 2), BATCH_ALONE), True),
])  # fmt: skip
def test_kernel_gradient_over_copies(operands, is_wrong):
    assert _kinds(_kernel_gradient(*operands, padding=(1, 1))) == [kf.COPIES] * is_wrong


# Types of image, kernel and result, and the attributes.
DEPTHWISE = (
    *("f32[4,16,4]", "f32[4,16,4]", "f32[3,1,4]"),
    "window={size=16 pad=1_1}, dim_labels=f0b_i0o->0bf, batch_group_count=4",
)
TRANSPOSED = (
    *("f32[8,16,8]", "f32[5,16,8]", "f32[8,16,16]"),
    "window={size=5 pad=2_2}, dim_labels=b0f_0oi->b0f",
)
FORWARD = (
    *("f32[8,16,8]", "f32[3,8,8]", "f32[8,16,8]"),
    "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
)
CHANNELS_2 = "[1,1,2,4]"
ONE_ELEMENT = "[1,2,1,4]"


def _of_eight(tiles):
    """A sharding over eight devices; where a fourth number follows, of so many copies."""
    copies = " last_tile_dim_replicate" * (tiles.count(",") == 3)
    return f"{{devices={tiles}<=[8]{copies}}}" if tiles.startswith("[") else tiles


@pytest.mark.parametrize("what, image, kernel, result, kind", [
    (DEPTHWISE, IDLE, IDLE, WHOLE, kf.COPIES),
    (DEPTHWISE, BATCH_ALONE, BATCH_ALONE, WHOLE, kf.COPIES),  # Unlike without groups.
    (DEPTHWISE, WITH_BATCH, WITH_BATCH, WHOLE, ""),
    (DEPTHWISE, "[2,1,2,2]", "[2,1,2,2]", WHOLE, ""),  # The batch and the channels.
    (DEPTHWISE, CHANNELS_2, CHANNELS_2, WHOLE, ""),
    # Grouped by channels first: the image's other devices hold copies.
    (DEPTHWISE, "[1,2,2,2]", "[1,2,1,4]", CHANNELS_2, kf.COPIES),
    (DEPTHWISE, "[2,2,2]", "[2,2,1,2]", CHANNELS_2, ""),
    # The gradient's channels are not sharded.
    (DEPTHWISE, "[1,2,2,2]", "[1,2,1,4]", WHOLE, ""),
    (DEPTHWISE, "[2,1,1,4]", "[1,1,2,4]", CHANNELS_2, kf.COPIES),  # Of different dimensions.
    # The gradient is sharded along its dimension of one element.
    (DEPTHWISE, WHOLE, WHOLE, ONE_ELEMENT, kf.GROUPS),
    (DEPTHWISE, CHANNELS_2, CHANNELS_2, "[1,4,2]", kf.GROUPS),
    (DEPTHWISE, WHOLE, WHOLE, CHANNELS_2, ""),
    (DEPTHWISE, WITH_BATCH, WITH_BATCH, ONE_ELEMENT, ""),  # It is summed.
    # Only the result is sharded along rows; the image's features are summed over devices with copies.
    (TRANSPOSED, "[1,1,2,4]", "[1,2,1,4]", "[4,2,1]", kf.COPIES),
    (TRANSPOSED, "[1,1,2,4]", "[1,2,1,4]", "[8,1,1]", ""),
    (TRANSPOSED, "[2,1,2,2]", "[1,2,1,4]", "[4,2,1]", ""),  # The image's batch is sharded.
    (TRANSPOSED, "[1,1,8]", "[1,8,1]", "[4,2,1]", ""),
    # Grouped by the batch.
    (FORWARD, "[2,2,1,2]", "[1,2,1,4]", "[2,1,2,2]", kf.COPIES),
    # The kernel is sharded over all devices; the batch into another number of parts.
    (FORWARD, "[2,2,1,2]", "[1,2,4]", "[2,1,2,2]", ""),
    (FORWARD, "[2,2,1,2]", "[1,2,1,4]", "[4,1,2]", ""),
])  # fmt: skip
def test_convolutions(what, image, kernel, result, kind):
    *types, made, attributes = what
    operands = zip(types, map(_of_eight, (image, kernel)))
    module = _module(8, list(operands), (made, "convolution", attributes, _of_eight(result)))
    assert _kinds(module) == [kind] * bool(kind)


def test_kernel_gradient_that_is_a_product():
    """Rows are summed like features if the kernel has one element and stride 1."""
    module = _kernel_gradient((16, 2), IDLE, (16, 2), IDLE, (0, 0))
    assert _kinds(module) == []


@pytest.mark.parametrize("parts, is_wrong", [(2, True), (4, False)])
def test_forward_convolution_over_copies(parts, is_wrong):
    """The kernel's features are sharded over the idle axis. XLA shards the kernel too only for two parts of rows."""
    devices = 2 * parts
    grid = ",".join(str(p + k * parts) for p in range(parts) for k in range(2))
    features = ",".join(map(str, range(devices)))
    operands = [
        ("f32[4,16,4]", f"{{devices=[1,{parts},1,2]{grid} last_tile_dim_replicate}}"),
        ("f32[3,4,8]", f"{{devices=[1,1,2,{parts}]{features} last_tile_dim_replicate}}"),
    ]
    attributes = "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f"
    result = ("f32[4,16,8]", "convolution", attributes, f"{{devices=[1,{parts},2]{grid}}}")
    assert _kinds(_module(devices, operands, result)) == [kf.COPIES] * is_wrong


@pytest.mark.parametrize("rows, results, padding, stride, is_wrong", [
    (12, 5, (0, 1), 3, True),
    (12, 6, (1, 3), 3, True),
    (13, 6, (1, 2), 3, False),  # Parts of 4 rows: windows go over less than two of them.
    (8, 6, (1, 2), 2, False),
    (12, 7, (0, 1), 2, False),  # The last part has a window.
    (12, 12, (1, 1), 1, False),
])  # fmt: skip
def test_kernel_gradient_of_windows_in_padding(rows, results, padding, stride, is_wrong):
    cut = "{devices=[1,4,1]<=[4]}"
    module = _kernel_gradient(
        (rows, 1), cut, (results, 1), cut, padding, stride, devices=4, batch=1
    )
    assert _kinds(module) == [kf.PADDED_WINDOWS] * is_wrong


def _dot(left, right, result, batch=((), ()), summed=((1,), (0,)), devices=8):
    keys = ("lhs_batch_dims", "rhs_batch_dims", "lhs_contracting_dims", "rhs_contracting_dims")
    dims = zip(keys, (*batch, *summed))
    attributes = ", ".join(f"{key}={{{','.join(map(str, d))}}}" for key, d in dims)
    return _module(devices, [left, right], (result[0], "dot", attributes, result[1]))


GRID = ("f32[16,16]", "{devices=[2,4]<=[8]}")
ROWS_ALIKE = {"batch": ((0,), (0,)), "summed": ((1,), (1,))}


@pytest.mark.parametrize(
    "result, is_wrong",
    [("{devices=[4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}", True), (WHOLE, False)],
)
def test_batch_cut_anew(result, is_wrong):
    module = _dot(GRID, GRID, ("f32[16]", result), **ROWS_ALIKE)
    assert _kinds(module) == [kf.BATCH] * is_wrong


@pytest.mark.parametrize(
    "result, is_wrong",
    [("{devices=[4,1,2]0,4,2,6,1,5,3,7}", True), ("{devices=[4,1,2]0,4,1,5,2,6,3,7}", False)],
)
def test_result_over_the_devices_of_a_sum_on_which_the_operands_disagree(result, is_wrong):
    """The larger operand decides which devices add up their parts."""
    left = ("f32[8,16,24]", "{devices=[1,2,2,2]0,1,4,5,2,3,6,7 last_tile_dim_replicate}")
    right = ("f32[24,16]", "{devices=[2,1,4]0,4,1,5,2,6,3,7 last_tile_dim_replicate}")
    module = _dot(left, right, ("f32[8,16,16]", result), summed=((2,), (0,)))
    assert _kinds(module) == [kf.EXCHANGED] * is_wrong


def test_batch_that_is_grouped_first():
    """The result has as many parts of the batch as the operands, in another dimension over the sum's devices."""
    operand = ("f32[8,8,16]", "{devices=[2,1,2]<=[4]}")
    rows = {"batch": ((0, 1), (0, 1)), "summed": ((2,), (2,))}
    result = ("f32[8,8]", "{devices=[2,2]<=[4]}")
    assert _kinds(_dot(operand, operand, result, **rows, devices=4)) == []


def test_batch_cut_anew_where_only_one_operand_is_cut_along_it():
    other = ("f32[16,16]", "{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}")
    result = ("f32[16]", "{devices=[4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}")
    assert _kinds(_dot(GRID, other, result, **ROWS_ALIKE)) == []


@pytest.mark.parametrize("result, is_wrong", [
    ("{devices=[1,2,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}", False),
    ("{devices=[4,2]0,4,2,6,1,5,3,7}", True),  # Rows over the axes c and b, columns over a.
    ("{devices=[4,2]0,4,1,5,2,6,3,7}", False),  # Rows over b and c, like the left operand's.
    ("{devices=[4,1,2]0,4,2,6,1,5,3,7 last_tile_dim_replicate}", False),  # Columns whole.
])  # fmt: skip
def test_result_over_the_devices_of_the_sum(result, is_wrong):
    """The mesh is a:2,b:2,c:2, the left operand over b and a, the right one over a and b; the sum is over a."""
    left = ("f32[16,8]", "{devices=[2,2,2]0,1,4,5,2,3,6,7 last_tile_dim_replicate}")
    right = ("f32[8,24]", "{devices=[2,2,2]<=[8] last_tile_dim_replicate}")
    module = _dot(left, right, ("f32[16,24]", result.replace("[1,2,4]", "[2,1,4]")))
    assert _kinds(module) == [kf.EXCHANGED] * is_wrong


@pytest.mark.parametrize("right, is_wrong", [
    ("{devices=[1,2,2]0,2,1,3}", True),
    ("{devices=[2,2,1]0,1,2,3}", False),  # Alike.
    ("{devices=[1,2,2]0,1,2,3}", False),  # The second dimension over other devices.
    (ROWS_2_OF_4.replace("[2,1,2]", "[1,2,1,2]"), False),  # In fewer parts.
])  # fmt: skip
def test_sum_over_differently_cut_dims(right, is_wrong):
    left = ("f32[12,4,8]", "{devices=[2,2,1]0,1,2,3}")
    everything = ((0, 1, 2), (0, 1, 2))
    module = _dot(left, ("f32[12,4,8]", right), ("f32[]", WHOLE), summed=everything, devices=4)
    assert _kinds(module) == [kf.SUMS] * is_wrong


@pytest.mark.parametrize("vector, matrix, result, is_wrong", [
    ("1,3,0,2", "3,1,0,2", "0,3,1,2", True),
    ("1,3,0,2", "1,3,0,2", "0,1,2,3", False),  # In order.
    ("0,1,2,3", "0,1,2,3", "0,2,1,3", False),
])  # fmt: skip
def test_sum_over_devices_in_another_order(vector, matrix, result, is_wrong):
    left = ("f32[2]", f"{{devices=[2,2]{vector} last_tile_dim_replicate}}")
    right = ("f32[2,4]", f"{{devices=[2,2]{matrix}}}")
    of_result = ("f32[4]", f"{{devices=[2,2]{result} last_tile_dim_replicate}}")
    module = _dot(left, right, of_result, summed=((0,), (0,)), devices=4)
    assert _kinds(module) == [kf.ADDING_UP] * is_wrong


@pytest.mark.parametrize("right, result, is_wrong", [
    ("1,5,0,4,2,6,3,7", "1,5,0,4,2,6,3,7", True),
    ("0,4,1,5,2,6,3,7", "0,4,1,5,2,6,3,7", False),  # As the left one numbers them.
    ("1,5,0,4,2,6,3,7", "0,4,1,5,2,6,3,7", False),
    ("1,4,0,5,2,6,3,7", "1,4,0,5,2,6,3,7", False),  # The two rows not alike.
])  # fmt: skip
def test_rows_in_different_orders(right, result, is_wrong):
    left = ("f32[2,12,8]", "{devices=[2,4,1]<=[8]}")
    dims = {"batch": ((2,), (0,)), "summed": ((0,), (1,))}
    cut = [f"{{devices=[4,2]{order}}}" for order in (right, result)]
    module = _dot(left, ("f32[8,2]", cut[0]), ("f32[8,12]", cut[1]), **dims)
    assert _kinds(module) == [kf.EXCHANGED] * is_wrong


def test_manual_parts_and_one_device_are_left_alone():
    assert _kinds(_scatter(15, "{manual}", made=ONES)) == []
    assert _kinds(_scatter(15, WHOLE, devices=1, made=ONES)) == []


def test_faults_inside_loops_are_found():
    text = f"""HloModule jit_call, num_partitions=2

%body (p: (f32[2,8,3], f32[2,7,3])) -> (f32[2,8,3], f32[2,7,3]) {{
  %p = (f32[2,8,3], f32[2,7,3]) parameter(0), sharding={{{MIDDLE}, {MIDDLE}}}
  %x = f32[2,8,3] get-tuple-element(%p), index=0, sharding={MIDDLE}
  %y = f32[2,7,3] get-tuple-element(%p), index=1, sharding={MIDDLE}
  %zero = f32[] constant(0)
  %s = f32[2,8,3] select-and-scatter(%x, %y, %zero), window={{size=1x2x1}}, select=%ge, scatter=%add, sharding={MIDDLE}
  ROOT %t = (f32[2,8,3], f32[2,7,3]) tuple(%s, %y), sharding={{{MIDDLE}, {MIDDLE}}}
}}

ENTRY %main (a: f32[2]) -> f32[2] {{
  ROOT %a = f32[2] parameter(0), sharding={WHOLE}
}}
"""
    (fault,) = kf.known_faults(parse_module(text))
    assert (fault.kind, fault.op, fault.instruction) == (kf.POOLING, "", "s")
    assert str(fault).startswith("s: the gradient of max pooling")


def test_error_names_operation_fault_and_remedy():
    with pytest.raises(ShardingError) as error:
        kf.refuse(kf.known_faults(_scatter(15, ROWS_8, made=ONES)), "train_step")
    assert str(error.value) == (
        "program 'train_step': XLA's partitioner would compute wrong numbers for 1 operation:\n"
        "- net/Op: the updates are sharded unevenly along dimension 0 (15 in 8 parts), and their padding "
        "lands in row 0, since the indices are not sharded over all devices. Instead: shard the "
        "indices like the updates, over all devices, or pad the updates to a multiple of the "
        "parts, with indices of -1."
    )
    kf.refuse(kf.known_faults(_scatter(16, ROWS_8, made=ONES)), "train_step")
