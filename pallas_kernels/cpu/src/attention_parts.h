// Paged attention of one call: cut into parts, which the threads of a pool share.
#pragma once

#include "attention.h"
#include "threads.h"

namespace jaxkv {

// Writes call.out and call.lse. The bits of neither depend on the pool.
void run_attention(const Attention& call, const AttentionKernels& kernels, Pool& pool);

}  // namespace jaxkv
