// Green contexts: how multiprocessors are divided.
#include "api_support.h"

using namespace apitest;

namespace {

CUdevResource ofDevice() {
  CUdevResource all{};
  OK(cuDeviceGetDevResource(0, &all, CU_DEV_RESOURCE_TYPE_SM));
  return all;
}

}  // namespace

TEST_CASE("multiprocessors are divided by the least size and the alignment") {
  Session session;
  const CUdevResource all = ofDevice();
  const unsigned least = all.sm.minSmPartitionSize, step = all.sm.smCoscheduledAlignment;
  REQUIRE(all.sm.smCount >= 2 * least);
  CUdevResource part{}, rest{};
  unsigned groups = 0, whole = 0;
  OK(cuDevSmResourceSplitByCount(nullptr, &groups, &all, nullptr, 0, 0));
  CHECK(groups == all.sm.smCount / least);
  OK(cuDevSmResourceSplitByCount(nullptr, &whole, &all, nullptr, 0, all.sm.smCount));
  CHECK(whole == 1);
  groups = 1;
  OK(cuDevSmResourceSplitByCount(&part, &groups, &all, &rest, 0, least - 1));
  CHECK(part.sm.smCount == least);
  CHECK(part.sm.smCount % step == 0);
  CHECK(rest.sm.smCount == all.sm.smCount - least);
  // All of it: nothing remains.
  OK(cuDevSmResourceSplitByCount(&part, &groups, &all, &rest, 0, all.sm.smCount));
  CHECK(rest.type == CU_DEV_RESOURCE_TYPE_INVALID);
  GIVES(CUDA_ERROR_INVALID_VALUE,
        cuDevSmResourceSplitByCount(&part, &groups, &all, nullptr, 0, all.sm.smCount + 1));
  GIVES(CUDA_ERROR_INVALID_RESOURCE_TYPE, cuDevSmResourceSplitByCount(&part, &groups, &rest, nullptr, 0, 1));
  GIVES(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION,
        cuDevSmResourceSplitByCount(&rest, &groups, &part, nullptr, 0, 1));
}

TEST_CASE("a green context has its parts, its streams and the primary context") {
  OK(cuInit(0));
  unsigned flags = 0;
  int active = -1;
  const CUdevResource all = ofDevice();
  CUdevResource parts[2] = {}, has{};
  unsigned groups = 2;
  OK(cuDevSmResourceSplitByCount(parts, &groups, &all, nullptr, 0, all.sm.minSmPartitionSize));
  REQUIRE(groups == 2);
  CUdevResourceDesc description = nullptr;
  OK(cuDevResourceGenerateDesc(&description, parts, 2));
  CUgreenCtx green = nullptr, its = nullptr;
  GIVES(CUDA_ERROR_INVALID_VALUE, cuGreenCtxCreate(&green, description, 0, 0));
  OK(cuGreenCtxCreate(&green, description, 0, CU_GREEN_CTX_DEFAULT_STREAM));
  OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
  CHECK(active == 1);
  OK(cuGreenCtxGetDevResource(green, &has, CU_DEV_RESOURCE_TYPE_SM));
  CHECK(has.sm.smCount == 2 * parts[0].sm.smCount);
  {
    Session session;
    CUstream stream = nullptr;
    CUcontext context = nullptr;
    GIVES(CUDA_ERROR_INVALID_VALUE, cuGreenCtxStreamCreate(&stream, green, CU_STREAM_DEFAULT, 0));
    OK(cuGreenCtxStreamCreate(&stream, green, CU_STREAM_NON_BLOCKING, 0));
    OK(cuStreamGetCtx_v2(stream, &context, &its));
    CHECK(context == session.context);
    CHECK(its == green);
    Buffer<int> b(1);
    OK(launch(session.function("addTo"), 1, 0, stream, b.address, 4));
    OK(cuStreamSynchronize(stream));
    CHECK(b.get()[0] == 4);
    OK(cuStreamDestroy(stream));
  }
  OK(cuGreenCtxDestroy(green));
  OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
  CHECK(active == 0);
  GIVES(CUDA_ERROR_INVALID_CONTEXT, cuGreenCtxDestroy(green));
}
