#pragma once
// One piece of stream work, the same whether a stream runs it or a graph node holds it. Immutable once built,
// so that a launch of a graph keeps what it was launched with while the executable graph is updated.

#include <functional>
#include <memory>

#include "server/softgpu/api/context.h"

namespace gpupool::softgpu::api {

struct Operation {
  virtual ~Operation() = default;
  virtual CUgraphNodeType type() const = 0;
  // On a stream's thread, or inline in a waiting caller. An error becomes the context's sticky one.
  virtual CUresult run(Context& context) const = 0;
};
using OperationPtr = std::shared_ptr<const Operation>;

// Appends it to the capture that `stream` takes part in, or submits it. Error: what the call returns.
CUresult submitOperation(Stream& stream, OperationPtr operation, Submit how, bool launch = false);

}  // namespace gpupool::softgpu::api
