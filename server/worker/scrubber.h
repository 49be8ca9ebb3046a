#pragma once
// Clears device memory beside a session's streams.
//
// As the launch of a graph, not as a memset of a stream: once about eight memsets (they are kernels) ran on a
// second stream of a context, driver 580 runs every kernel of the first 0.2 us later, graphs' kernels too
// (graph of 50: 31 -> 40 us, natively as well). A graph's memset does not count, and is as fast. Figures:
// perf/results/2026-11-23-h200-second-stream.md.
//
// Threads: one at a time. Ends before its context.

#include <cstddef>

#include "server/driver.h"

namespace gpupool::server {

class Scrubber {
 public:
  // piece: bytes that one launch clears, a multiple of 4. More than the default was never tried on a GPU.
  explicit Scrubber(const Driver& driver, size_t piece = size_t{1} << 30) : driver_(driver), piece_(piece) {}
  ~Scrubber();
  Scrubber(const Scrubber&) = delete;
  Scrubber& operator=(const Scrubber&) = delete;

  // Writes zeros and waits for them; bytes is a multiple of 4. The same context is current at each call.
  CUresult clear(CUdeviceptr address, size_t bytes);
  // Does so with memory of its own, which it keeps. In a context that has done this driver 580 places
  // variables of code that is loaded later in another of its address pools than in one that has not
  // (0x400210800000, not 0x40022de00000): who needs them at the same addresses does it in each context before
  // anything is loaded.
  CUresult prepare();

 private:
  CUresult make(const CUDA_MEMSET_NODE_PARAMS& fill, CUcontext context);
  CUresult start(CUdeviceptr address, size_t bytes, CUcontext context);

  const Driver& driver_;
  const size_t piece_;
  CUstream stream_ = nullptr;
  CUgraph graph_ = nullptr;
  CUgraphNode node_ = nullptr;
  CUgraphExec exec_ = nullptr;
  CUdeviceptr own_ = 0;
};

}  // namespace gpupool::server
