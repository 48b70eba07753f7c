"""Rows from anywhere in memory, through registers: to another place in memory, and to a stage.

The copy engine lays a row out as it is, and the tensor cores want tiles of eight rows. Threads
store a row both ways, so that nobody has to read again what was just written.

A line is a part of a row, 512 bytes: a warp loads and stores it at once, 16 bytes a lane. What a
warpgroup has loaded are words [WORDS], whose order nobody needs to know.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.hopper import ptx

LINE = 256  # numbers of two bytes
OF_LANE = 8  # of them
BLOCK = 64  # are a row of a stage's tile
TOGETHER = 2  # lines of a row that are loaded, the last of which may be past its end
WARPS, WARPGROUPS = 4, 2
ROWS_APART = WARPS * WARPGROUPS  # warp w of both has the rows w, w + 8, …
LINES = 7  # of a warp
ROWS = ROWS_APART * LINES
WORDS = WARPS * 32 * 4 * LINES
LAYOUT = plgpu.Layout.WG_STRIDED((WORDS,), vec_size=4)
TOKENS = WARPS * 32 * LINES
LAYOUT_OF_TOKENS = plgpu.Layout.WG_STRIDED((TOKENS,), vec_size=1)
NUMBERS = (ptx.NUMBER,) * 4
STAGE = plgpu.RefType((plgpu.SwizzleTransform(128),))

# A lane's code: what is behind AT is the number of a warp's line, or how many bytes away it is.
ADD = "add.s32 $0, $1, $2;"
ADDRESS = """{
.reg .b64 place;
mad.wide.s32 place, $1, STRIDE, $3;
mad.wide.s32 $0, $2, 2, place;
}"""
LOAD_TOKEN = """{
.reg .pred exists;
setp.gt.s32 exists, $1, AT_LINE;
@exists ld.global.nc.b32 $0, [$2 + AT_TOKEN];
}"""
LOAD_LINE = """{
.reg .pred exists; .reg .b64 place, stays;
setp.gt.s32 exists, $4, AT_LINE;
mad.wide.s32 place, $5, STRIDE, $6;
createpolicy.fractional.L2::LOADED.b64 stays, 1.0;
@exists ld.global.nc.L2::cache_hint.v4.b32 {$0, $1, $2, $3}, [place], stays;
OR_ZEROS}"""
OR_ZEROS = "".join(f"selp.b32 ${word}, ${word}, 0, exists;\n" for word in range(4))
STORE_LINE = """{
.reg .pred exists;
setp.gt.s32 exists, $4, AT_LINE;
@exists st.shared.v4.b32 [$5 + AT_STAGE], {$0, $1, $2, $3};
setp.gt.s32 exists, $6, AT_LINE;
@exists st.globalSTORED.v4.b32 [$7 + AT_ROW], {$0, $1, $2, $3};
}"""


class Lines:
    """A warpgroup's lines of rows, from where they are to where they belong.

    Args:
      x, y: rows of `width` numbers of 2 bytes, a multiple of BLOCK, as lines [rows, n, width / n].
      token: int32, which row of x each row of y is. which: of the two warpgroups, 0 or 1.
      again: whether rows of x are read several times, and would be driven out of the L2 by those of
        y: they stay, and what is stored leaves first.
    """

    def __init__(self, x, token, y, width: int, which, again: bool, interpreted: bool):
        self.x, self.token, self.y, self.width, self.which = x, token, y, width, which
        self.again, self.interpreted = again, interpreted

    def tokens(self, row, count):
        """The tokens of a warp's rows, of `count` from a row on: int32 [TOKENS], for `load`."""
        if self.interpreted:
            return jnp.int32(0)

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), *NUMBERS[:3]),
            return_type=plgpu.ShapeDtypeStruct((TOKENS,), jnp.int32, layout=LAYOUT_OF_TOKENS),
        )
        def tokens(context, *arguments):
            del context
            token, which, row, count = map(ptx.value, arguments)
            own, lines = _lines_of_warp(which, count)
            first = _address(token, arith.addi(row, own), ptx.number(0), 4)
            found = [[_asm(LOAD_TOKEN, number, 1, lines, first)] for number in range(LINES)]
            return _registers(found, LAYOUT_OF_TOKENS)

        return tokens(self.token, self.which, row, count)

    def either(self, first, tokens, others):
        """Tokens, or others: a condition has no array's layout."""
        if self.interpreted:
            return tokens

        @plgpu.inline_mgpu(
            arg_types=(NUMBERS[0], LAYOUT_OF_TOKENS, LAYOUT_OF_TOKENS),
            return_type=plgpu.ShapeDtypeStruct((TOKENS,), jnp.int32, layout=LAYOUT_OF_TOKENS),
        )
        def either(context, first, tokens, others):
            del context
            pairs = zip(tokens.registers, others.registers, strict=True)
            words = ([vector.extract(its, [], [0]) for its in pair] for pair in pairs)
            chosen = [[arith.select(ptx.value(first), *its)] for its in words]
            return _registers(chosen, LAYOUT_OF_TOKENS)

        return either(first, tokens, others)

    def load(self, tokens, count, column):
        """Begins to load a line of each of `count` rows, at most ROWS, from a column on.

        Returns:
          int32 [WORDS], to be stored; zeros for columns past the width.
        """
        if self.interpreted:
            return jnp.int32(0)

        @plgpu.inline_mgpu(
            arg_types=(LAYOUT_OF_TOKENS, plgpu.RefType(), *NUMBERS[:3]),
            return_type=plgpu.ShapeDtypeStruct((WORDS,), jnp.int32, layout=LAYOUT),
        )
        def load(context, tokens, *arguments):
            del context
            x, which, count, column = map(ptx.value, arguments)
            column = arith.addi(column, _lane_column())
            _, lines = _lines_of_warp(which, count)
            exist = self._inside(column, lines)
            place = _address(x, ptx.number(0), column, 0)
            found = []
            for number, its in enumerate(tokens.registers):
                token = vector.extract(its, [], [0])
                found.append(self._asm(LOAD_LINE, number, 4, exist, token, place))
            return _registers(found, LAYOUT)

        return load(tokens, self.x, self.which, count, column)

    def store(self, words, stage, row, count, column):
        """Stores what `load` has loaded, in the rows of y, and in tiles for the tensor cores.

        Args:
          stage: [LINE / BLOCK, rows, BLOCK] in shared memory, swizzled.
        """
        if self.interpreted:
            self._copy(stage, row, count, column)
            return

        @plgpu.inline_mgpu(arg_types=(LAYOUT, STAGE, plgpu.RefType(), *NUMBERS))
        def store(context, words, stage, y, *numbers):
            del context
            strides, _ = ir.MemRefType(stage.type).get_strides_and_offset()
            stage, y, which, row, count, column = map(ptx.value, (stage, y, *numbers))
            column = arith.addi(column, _lane_column())
            own, lines = _lines_of_warp(which, count)
            exist = self._inside(column, lines)
            in_stage = _asm(ADD, 0, 1, stage, _place_in_stage(own, 2 * strides[0]))
            place = _address(y, arith.addi(row, own), column, self.stride)
            for number, line in enumerate(words.registers):
                four = [vector.extract(line, [], [word]) for word in range(4)]
                places = lines, in_stage, exist, place
                self._asm(STORE_LINE, number, 0, *four, *places)

        store(words, stage, self.y, self.which, row, count, column)

    @property
    def stride(self) -> int:
        """Bytes of a row."""
        return 2 * self.width

    @property
    def is_whole(self) -> bool:
        """Whether no lane of any line is past a row's end."""
        return self.width % (TOGETHER * LINE) == 0

    def _asm(self, code: str, *operands):
        loaded, stored = ("evict_last", ".cs") if self.again else ("evict_normal", "")
        zeros = "" if self.is_whole else OR_ZEROS
        code = code.replace("LOADED", loaded).replace("STORED", stored).replace("OR_ZEROS", zeros)
        return _asm(code, *operands, stride=self.stride)

    def _inside(self, column, number):
        """The number, or zero for a lane that is past the row's end."""
        if self.is_whole:
            return number
        inside = arith.cmpi(arith.CmpIPredicate.slt, column, ptx.number(self.width))
        return arith.select(inside, number, ptx.number(0))

    def _copy(self, stage, row, count, column):
        """Both of them, for the interpreter."""

        def copy(number, _):
            own = self.which + WARPGROUPS * number
            token = self.token[row + own]
            for block in range(LINE // BLOCK):
                first = column + BLOCK * block
                inside = first < self.width
                first = jnp.where(inside, first, 0)
                line = self.x.shape[-1]
                part = pl.multiple_of(lax.rem(first, line), BLOCK)
                place = lax.div(first, line), pl.ds(part, BLOCK)
                values = self.x[token, *place]
                stage[block, own] = jnp.where(inside, values, jnp.zeros_like(values))

                @pl.when(inside)
                def _store(place=place, values=values):
                    self.y[row + own, *place] = values

        lax.fori_loop(0, lax.div(count - self.which + 1, WARPGROUPS), copy, None)


def _place_in_stage(row, blocks: int):
    """Bytes to a lane's part of a row; `blocks` are those from one block of columns to the next.

    A row's eight parts of 16 bytes are in an order that follows from the row (the swizzle).
    """
    lane = _lane()
    block, part = arith.shrui(lane, ptx.number(3)), arith.andi(lane, ptx.number(7))
    part = arith.xori(part, arith.andi(row, ptx.number(7)))
    of_row = arith.muli(row, ptx.number(2 * BLOCK))
    of_row = arith.addi(of_row, arith.muli(block, ptx.number(blocks)))
    return arith.addi(of_row, arith.muli(part, ptx.number(2 * OF_LANE)))


def _lines_of_warp(which, count):
    """A warp's first row, and how many of `count` rows are its."""
    warp = arith.andi(utils.warp_idx(), ptx.number(WARPS - 1))
    first = arith.addi(warp, arith.muli(which, ptx.number(WARPS)))
    rest = arith.subi(arith.addi(count, ptx.number(ROWS_APART - 1)), first)
    return first, arith.shrui(rest, ptx.number(ROWS_APART.bit_length() - 1))


def _lane_column():
    return arith.muli(_lane(), ptx.number(OF_LANE))


def _lane():
    return ptx.thread(warps=1)


def _address(array, row, column, stride: int):
    """Of a row's column, of two bytes each."""
    code = ADDRESS.replace("STRIDE", str(stride))
    kind = ir.IntegerType.get_signless(64)
    return utils.inline_ptx(code, row, column, array, result_types=kind)


def _asm(code: str, number: int, results: int, *operands, stride: int = 0):
    """Behind each other, as written: a load does not wait until its result is needed."""
    rows = number * ROWS_APART
    sizes = dict(AT_LINE=number, AT_TOKEN=4 * rows, AT_STAGE=2 * BLOCK * rows, AT_ROW=stride * rows)
    for name, size in (sizes | dict(STRIDE=stride)).items():
        code = code.replace(name, str(size))
    types = [ptx.int32()] * results
    found = utils.inline_ptx(code, *operands, result_types=types or None, has_side_effects=True)
    return found[0] if results == 1 else found


def _registers(values, layout):
    """A thread's words, those of each register together, as an array of that layout."""
    kind = ir.VectorType.get((len(values[0]),), ptx.int32())
    registers = [vector.from_elements(kind, its) for its in values]
    return fragmented_array.FragmentedArray(
        _registers=np.array(registers, dtype=object), _layout=layout.to_mgpu(), _is_signed=True
    )
