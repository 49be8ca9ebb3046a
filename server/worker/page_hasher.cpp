#include "server/worker/page_hasher.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "server/arena_mmap.h"

namespace gpupool::server {
namespace {

constexpr size_t kAtOnce = size_t{1} << 15;  // pages: 64 GiB
constexpr size_t kHashBytes = kAtOnce * sizeof(Checksum);
constexpr unsigned kThreads = 256;  // of a block, which hashes one page

#define MULTIPLIER_1 "0x9E3779B185EBCA87"
#define MULTIPLIER_2 "0xC2B2AE3D27D4EB4F"
#define MULTIPLIER_3 "0x165667B19E3779F9"
#define MULTIPLIER_4 "0x85EBCA77C2B2AE63"
#define MULTIPLIER_5 "0x27D4EB2F165667C5"
#define ROUND(chain, word, multiplier, left, right, last)  \
  "mad.lo.u64 " chain ", " word ", " multiplier ", " chain \
  ";\n"                                                    \
  "shl.b64 %u, " chain ", " left                           \
  ";\n"                                                    \
  "shr.u64 %v, " chain ", " right                          \
  ";\n"                                                    \
  "or.b64 " chain                                          \
  ", %u, %v;\n"                                            \
  "mul.lo.u64 " chain ", " chain ", " last ";\n"
#define ROUND_A(word) ROUND("%a", word, MULTIPLIER_2, "31", "33", MULTIPLIER_1)
#define ROUND_B(word) ROUND("%b", word, MULTIPLIER_4, "27", "37", MULTIPLIER_3)
#define VECTOR(x, y) ROUND_A(x) ROUND_A(y) ROUND_B(y) ROUND_B(x)
#define AVALANCHE(chain)                                                                                \
  "shr.u64 %u, " chain ", 33; xor.b64 " chain ", " chain ", %u; mul.lo.u64 " chain ", " chain           \
  ", " MULTIPLIER_2 ";\nshr.u64 %u, " chain ", 29; xor.b64 " chain ", " chain ", %u; mul.lo.u64 " chain \
  ", " chain ", " MULTIPLIER_3 ";\nshr.u64 %u, " chain ", 32; xor.b64 " chain ", " chain ", %u;\n"

// 16 bytes at a time, neighbours by neighbouring threads, four loads under way.
constexpr char kCode[] = R"(
.version 6.0
.target sm_60
.address_size 64
.visible .entry gpupoolHashPages(.param .u64 pages, .param .u64 hashes)
{
  .reg .pred %p;
  .reg .b32 %t, %block, %n, %at, %from, %half;
  .reg .b64 %page, %out, %offset, %a, %b, %u, %v;
  .reg .b64 %x0, %y0, %x1, %y1, %x2, %y2, %x3, %y3;
  .shared .align 16 .b8 sums[4096];
  mov.u32 %t, %tid.x;
  mov.u32 %block, %ctaid.x;
  ld.param.u64 %page, [pages];
  ld.param.u64 %out, [hashes];
  mul.wide.u32 %offset, %block, 2097152;
  add.u64 %page, %page, %offset;
  mul.wide.u32 %offset, %t, 16;
  add.u64 %page, %page, %offset;
  mul.wide.u32 %offset, %block, 16;
  add.u64 %out, %out, %offset;
  add.u32 %n, %t, 1;
  cvt.u64.u32 %u, %n;
  mul.lo.u64 %a, %u, )" MULTIPLIER_5 R"(;
  mul.lo.u64 %b, %a, )" MULTIPLIER_1 R"(;
  mov.u32 %n, 0;
NEXT:
  ld.global.v2.u64 {%x0, %y0}, [%page];
  ld.global.v2.u64 {%x1, %y1}, [%page+4096];
  ld.global.v2.u64 {%x2, %y2}, [%page+8192];
  ld.global.v2.u64 {%x3, %y3}, [%page+12288];
)" VECTOR("%x0", "%y0") VECTOR("%x1", "%y1") VECTOR("%x2", "%y2") VECTOR("%x3", "%y3") R"(
  add.u64 %page, %page, 16384;
  add.u32 %n, %n, 1;
  setp.lt.u32 %p, %n, 128;
  @%p bra NEXT;
)" AVALANCHE("%a") AVALANCHE("%b") R"(
  mov.u32 %at, sums;
  shl.b32 %n, %t, 4;
  add.u32 %at, %at, %n;
  st.shared.v2.u64 [%at], {%a, %b};
  mov.u32 %half, 128;
FOLD:
  bar.sync 0;
  setp.ge.u32 %p, %t, %half;
  @%p bra WAIT;
  shl.b32 %n, %half, 4;
  add.u32 %from, %at, %n;
  ld.shared.v2.u64 {%x0, %y0}, [%at];
  ld.shared.v2.u64 {%x1, %y1}, [%from];
  add.u64 %x0, %x0, %x1;
  add.u64 %y0, %y0, %y1;
  st.shared.v2.u64 [%at], {%x0, %y0};
WAIT:
  shr.u32 %half, %half, 1;
  setp.ne.u32 %p, %half, 0;
  @%p bra FOLD;
  setp.ne.u32 %p, %t, 0;
  @%p bra END;
  ld.shared.v2.u64 {%x0, %y0}, [%at];
  st.global.v2.u64 [%out], {%x0, %y0};
END:
  ret;
}
)";

}  // namespace

CUresult PageHasher::prepare() {
  CUmodule module = nullptr;
  CUDA_KERNEL_NODE_PARAMS_v2 launch{};
  CUdeviceptr pages = 0;
  void* parameters[] = {&pages, &own_};
  CUresult result = driver_.cuModuleLoadData(&module, kCode);
  if (result == CUDA_SUCCESS) result = driver_.cuModuleGetFunction(&kernel_, module, "gpupoolHashPages");
  if (result == CUDA_SUCCESS) result = driver_.cuMemAlloc_v2(&own_, kHashBytes + kPageBytes);
  void* pinned = nullptr;
  if (result == CUDA_SUCCESS)
    result = driver_.cuMemHostAlloc(&pinned, kPinnedBytes, CU_MEMHOSTALLOC_PORTABLE);
  pinned_ = static_cast<std::byte*>(pinned);
  if (result == CUDA_SUCCESS) result = driver_.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING);
  if (result == CUDA_SUCCESS) result = driver_.cuGraphCreate(&graph_, 0);
  launch.func = kernel_;
  launch.gridDimX = launch.gridDimY = launch.gridDimZ = 1;
  launch.blockDimX = kThreads;
  launch.blockDimY = launch.blockDimZ = 1;
  launch.kernelParams = parameters;
  if (result == CUDA_SUCCESS) result = driver_.cuGraphAddKernelNode_v2(&node_, graph_, nullptr, 0, &launch);
  if (result == CUDA_SUCCESS) result = driver_.cuGraphInstantiateWithFlags(&exec_, graph_, 0);
  return result == CUDA_SUCCESS ? useFirst() : result;
}

CUresult PageHasher::useFirst() {
  Checksum ignored{};
  CUresult result = begin(own_ + kHashBytes, std::span(&ignored, 1));
  if (result == CUDA_SUCCESS) result = finish();
  if (result == CUDA_SUCCESS)
    result = driver_.cuMemcpyDtoDAsync_v2(own_, own_ + kHashBytes, sizeof ignored, stream_);
  if (result == CUDA_SUCCESS)
    result = driver_.cuMemcpyDtoHAsync_v2(pinned_, own_ + kHashBytes, sizeof ignored, stream_);
  const CUresult finished = driver_.cuStreamSynchronize(stream_);
  return result == CUDA_SUCCESS ? finished : result;
}

CUresult PageHasher::beginSome(CUdeviceptr address, std::span<Checksum> hashes) {
  CUdeviceptr out = own_ + begunPages_ * sizeof(Checksum);
  void* parameters[] = {&address, &out};
  CUDA_KERNEL_NODE_PARAMS_v2 launch{};
  launch.func = kernel_;
  launch.gridDimX = static_cast<unsigned>(hashes.size());
  launch.gridDimY = launch.gridDimZ = 1;
  launch.blockDimX = kThreads;
  launch.blockDimY = launch.blockDimZ = 1;
  launch.kernelParams = parameters;
  CUresult result = driver_.cuGraphExecKernelNodeSetParams_v2(exec_, node_, &launch);
  if (result == CUDA_SUCCESS) result = driver_.cuGraphLaunch(exec_, stream_);
  if (result != CUDA_SUCCESS) return result;
  begun_.push_back(hashes);
  begunPages_ += hashes.size();
  return CUDA_SUCCESS;
}

CUresult PageHasher::begin(CUdeviceptr address, std::span<Checksum> hashes) {
  CUresult result = CUDA_SUCCESS;
  while (result == CUDA_SUCCESS && !hashes.empty()) {
    if (begunPages_ == kAtOnce) result = finish();
    const size_t pages = std::min(kAtOnce - begunPages_, hashes.size());
    if (result == CUDA_SUCCESS) result = beginSome(address, hashes.first(pages));
    address += pages * kPageBytes;
    hashes = hashes.subspan(pages);
  }
  return result;
}

CUresult PageHasher::finish() {
  const auto begun = std::exchange(begun_, {});
  const size_t pages = std::exchange(begunPages_, 0);
  auto* hashes = reinterpret_cast<Checksum*>(pinned_);
  static_assert(kHashBytes <= kPinnedBytes);
  CUresult result = CUDA_SUCCESS;
  if (pages != 0) result = driver_.cuMemcpyDtoHAsync_v2(hashes, own_, pages * sizeof(Checksum), stream_);
  const CUresult finished = driver_.cuStreamSynchronize(stream_);
  if (result == CUDA_SUCCESS) result = finished;
  for (const std::span<Checksum> some : begun) {
    if (result == CUDA_SUCCESS) std::copy_n(hashes, some.size(), some.begin());
    hashes += some.size();
  }
  return result;
}

void PageHashers::contextMade(CUcontext context) {
  if (!wanted_) return;
  std::lock_guard lock(mutex_);
  const auto [at, made] = hashers_.try_emplace(context, driver_);
  if (!made) return;
  CUresult result = driver_.cuCtxPushCurrent_v2(context);
  if (result == CUDA_SUCCESS) {
    PlaceGlobals place;
    result = at->second.prepare();
    driver_.cuCtxPopCurrent_v2(&context);
  }
  if (result == CUDA_SUCCESS) return;
  GPUPOOL_WARNING("no pages are hashed in a context: %s", driver_.describe(result).c_str());
  hashers_.erase(at);
}

void PageHashers::contextEnded(CUcontext context) {
  std::lock_guard lock(mutex_);
  hashers_.erase(context);
}

PageHasher* PageHashers::find(CUcontext context) {
  std::lock_guard lock(mutex_);
  const auto at = hashers_.find(context);
  return at == hashers_.end() ? nullptr : &at->second;
}

}  // namespace gpupool::server
