"""Which of two programs of a kernel comes last: it finds in memory what both have stored.

Nobody waits. Each counts a word up when it has stored, from 0 to 1 or from 1 to 0 again, and the
one that finds 1 is the last: all that the other stored before it counted is visible to it then. So
the words, which a kernel before has made zeros, are to XLA what they are: read, by any number of
kernels one after the other.
"""

from __future__ import annotations

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

FOUND_BY_LAST = 1

# $0: the word, $1: where it is put, $2: whether this thread does it.
COUNT = f"""{{
.reg .b32 found;
@$2 atom.acq_rel.gpu.global.inc.u32 found, [$0], {FOUND_BY_LAST};
@$2 st.shared.b32 [$1], found;
}}"""


def count_up(word, place):
    """Counts a program in. One warpgroup does, when it knows that the program's stores are done.

    Args:
      word: int32 [1] in global memory.
      place: int32 [1] in shared memory, for what was found there. Who is told by a barrier that it
        is there may read what the other program has stored, if it is FOUND_BY_LAST.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def count(context, word, place):
        del context
        thread = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        addresses = map(utils.memref_ptr, (word, place))
        utils.inline_ptx(COUNT, *addresses, thread, has_side_effects=True)

    count(word, place)
