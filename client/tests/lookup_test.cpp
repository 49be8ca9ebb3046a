// Expected values are the answers of driver 580.159 to the same questions.
#include "client/lookup.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "catch.h"
#include "client/exports.h"

namespace gpupool::client {

// Every name of the driver; the address says which entry it is. Two are declared unsupported.
std::span<const Export> exports() {
  static std::vector<Export> list = [] {
    std::vector<Export> made = {
#define NAME(name) {#name, nullptr, true},
#include "schema/names.def"
#undef NAME
    };
    for (auto& entry : made) {
      entry.address = const_cast<char*>(entry.name);
      if (std::strcmp(entry.name, "cuMemcpyBatchAsync_v2") == 0) entry.supported = false;
      if (std::strcmp(entry.name, "cuLogsCurrent") == 0) entry.supported = false;
    }
    return made;
  }();
  return list;
}

}  // namespace gpupool::client

using namespace gpupool::client;

namespace {

struct Result {
  CUresult result;
  int status;
  std::string symbol;
};

Result ask(const char* name, int version, cuuint64_t flags) {
  void* address = nullptr;
  auto status = CU_GET_PROC_ADDRESS_SUCCESS;
  const CUresult result = lookup(name, version, flags, &address, &status);
  return {result, static_cast<int>(status), address ? static_cast<const char*>(address) : "none"};
}

void check(const char* name, int version, cuuint64_t flags, int status, const std::string& symbol) {
  const Result got = ask(name, version, flags);
  INFO(name << " " << version << " " << flags);
  CHECK(got.result == CUDA_SUCCESS);
  CHECK(got.status == status);
  CHECK(got.symbol == symbol);
}

}  // namespace

TEST_CASE("lookup: the newest variant that is old enough") {
  check("cuMemAlloc", 1990, 0, 2, "none");
  check("cuMemAlloc", 2000, 0, 0, "cuMemAlloc");
  check("cuMemAlloc", 3010, 0, 0, "cuMemAlloc");
  check("cuMemAlloc", 3020, 0, 0, "cuMemAlloc_v2");
  check("cuMemAlloc", 13000, 1, 0, "cuMemAlloc_v2");
  check("cuCtxCreate", 11030, 0, 0, "cuCtxCreate_v2");
  check("cuCtxCreate", 11040, 0, 0, "cuCtxCreate_v3");
  check("cuCtxCreate", 12050, 0, 0, "cuCtxCreate_v4");
  check("cuStreamGetCaptureInfo", 11030, 0, 0, "cuStreamGetCaptureInfo_v2");
  check("cuStreamGetCaptureInfo", 12030, 0, 0, "cuStreamGetCaptureInfo_v3");
  check("cuCtxGetDevice", 12090, 0, 0, "cuCtxGetDevice");
  check("cuCtxGetDevice", 13000, 0, 0, "cuCtxGetDevice_v2");
  check("cuGetProcAddress", 12000, 0, 0, "cuGetProcAddress_v2");
  check("cuGraphInstantiate", 13000, 0, 0, "cuGraphInstantiate_v2");
  check("cuInit", -1, 0, 0, "cuInit");
  check("cuProfilerStart", 4000, 0, 0, "cuProfilerStart");
}

TEST_CASE("lookup: per-thread default stream") {
  check("cuMemcpyHtoD", 6990, 2, 2, "none");
  check("cuMemcpyHtoD", 7000, 2, 0, "cuMemcpyHtoD_v2_ptds");
  check("cuMemcpyHtoD", 7000, 1, 0, "cuMemcpyHtoD_v2");
  check("cuMemPrefetchAsync", 12020, 2, 0, "cuMemPrefetchAsync_v2_ptsz");
  check("cuMemPrefetchAsync", 8000, 2, 0, "cuMemPrefetchAsync_ptsz");
  check("cuMemAlloc", 3020, 2, 0, "cuMemAlloc_v2");
}

TEST_CASE("lookup: what is not there") {
  check("", 0, 0, 1, "none");
  check("cuMemAlloc_v2", 13000, 0, 1, "none");
  check("cuMemcpy_ptds", 13000, 0, 1, "none");
  check("cumemalloc", 13000, 0, 1, "none");
  check("cudaMalloc", 13000, 0, 1, "none");
  check("cuGLInit", 13000, 0, 1, "none");
  void* address = &address;
  CHECK(lookup("cuFoo", 13000, 0, &address, nullptr) == CUDA_SUCCESS);
  CHECK(address == nullptr);
  address = &address;
  CHECK(lookupOld("cuFoo", 13000, 0, &address) == CUDA_ERROR_NOT_FOUND);
  CHECK(address == &address);
  CHECK(lookupOld("cuInit", 1000, 0, &address) == CUDA_ERROR_NOT_FOUND);
  CHECK(lookupOld("cuInit", 2000, 0, &address) == CUDA_SUCCESS);
}

// Its runtime asks by the driver's version where that is lower than its own.
TEST_CASE("lookup: what CUDA 13.1 adds is not there, as in a driver of 13.0") {
  for (const char* name :
       {"cuDevSmResourceSplit", "cuGraphExecGetId", "cuGraphGetId", "cuGraphNodeGetContainingGraph",
        "cuGraphNodeGetLocalId", "cuGraphNodeGetToolsId", "cuStreamGetDevResource", "cuMulticastBindAddr_v2",
        "cuMulticastBindMem_v2", "cuStreamGetDevResource_ptsz"}) {
    check(name, 13000, 0, 1, "none");
    check(name, 13000, 2, 1, "none");
    CHECK(ask(name, 13010, 0).result == CUDA_ERROR_INVALID_VALUE);
    const auto all = exports();
    CHECK(std::none_of(all.begin(), all.end(),
                       [&](const Export& one) { return std::strcmp(one.name, name) == 0; }));
  }
  check("cuMulticastBindAddr", 13000, 0, 0, "cuMulticastBindAddr");
  CHECK(ask("cuMulticastBindAddr", 13010, 0).result == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("lookup: refused requests") {
  void* address = nullptr;
  CHECK(ask("cuCtxGetDevice", 13010, 0).result == CUDA_ERROR_INVALID_VALUE);
  CHECK(ask("cuInit", 13000, 4).result == CUDA_ERROR_INVALID_VALUE);
  CHECK(lookup(nullptr, 13000, 0, &address, nullptr) == CUDA_ERROR_INVALID_VALUE);
  CHECK(lookup("cuInit", 13000, 0, nullptr, nullptr) == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("lookup: an unsupported export is not found, and no older variant takes its place") {
  check("cuLogsCurrent", 13000, 0, 1, "none");
  check("cuMemcpyBatchAsync", 12090, 0, 0, "cuMemcpyBatchAsync");
  check("cuMemcpyBatchAsync", 13000, 0, 1, "none");
  check("cuMemcpyBatchAsync", 13000, 2, 0, "cuMemcpyBatchAsync_v2_ptsz");
}

TEST_CASE("lookup: every variant of the table is an export and is reachable") {
  struct Variant {
    const char* name;
    int version, perThread;
    const char* symbol;
  };
  const std::vector<Variant> table = {
#define PROC(name, version, perThread, symbol) {#name, version, perThread, #symbol},
#include "client/proc_address.def"
#undef PROC
  };
  CHECK(table.size() == 637);
  for (const auto& variant : table) {
    if (std::string(variant.symbol) == "cuLogsCurrent" ||
        std::string(variant.symbol) == "cuMemcpyBatchAsync_v2")
      continue;
    check(variant.name, variant.version, variant.perThread ? 2 : 0, 0, variant.symbol);
  }
}
