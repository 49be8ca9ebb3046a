#pragma once
// Copies (driver manual: Memory Management, cuMemcpy*): every form becomes one three-dimensional plan.

#include <memory>
#include <vector>

#include "server/softgpu/api/operation.h"

namespace gpupool::softgpu::api {

struct CopySide {
  uint64_t base = 0;                 // the first byte
  uint64_t pitch = 0, slice = 0;     // bytes from row to row, from plane to plane
  bool known = false;                // memory of the address map: looked up again before it is touched
  bool pageable = false;             // host memory the driver does not know
  std::shared_ptr<const void> keep;  // what must outlive the copy: an array, a snapshot
};

struct CopyPlan {
  CopySide source, target;
  uint64_t width = 0, height = 1, depth = 1;  // width in bytes
  uint64_t generation = 0;                    // unmapGeneration() when the sides were looked up
  uint64_t bytes() const { return width * height * depth; }
};

struct CopyOperation : Operation {
  CopyPlan plan;
  CUDA_MEMCPY3D parameters{};  // as a graph node reports it
  CUcontext context = nullptr;
  CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_MEMCPY; }
  CUresult run(Context& context) const override;
};

// CUDA_ERROR_INVALID_VALUE for ranges that are not memory, pitches too small, extents beyond arrays.
CUresult planCopy(const CUDA_MEMCPY3D& parameters, CopyPlan& plan);
// `bytes` in a row; the memory types say which side the driver must know.
CUDA_MEMCPY3D linearCopy(CUmemorytype targetType, uint64_t target, CUmemorytype sourceType, uint64_t source,
                         uint64_t bytes);

struct MemsetOperation : Operation {
  CUDA_MEMSET_NODE_PARAMS parameters{};
  CUcontext context = nullptr;
  CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_MEMSET; }
  CUresult run(Context& context) const override;
};
CUresult checkMemset(const CUDA_MEMSET_NODE_PARAMS& parameters);

}  // namespace gpupool::softgpu::api
