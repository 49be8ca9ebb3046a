#include "client/memory/shares.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "client/session.h"

namespace gpupool::client {
namespace {

constexpr uint64_t kMagic = 0x6572'6168'736c'7067;  // "gplshare"
constexpr int kSeals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;

struct Carried {
  uint64_t magic = kMagic;
  uint32_t kind = 0, reserved = 0;
  Share share;

  bool is(ShareKind wanted) const { return magic == kMagic && kind == static_cast<uint32_t>(wanted); }
};
static_assert(sizeof(Carried) <= CU_IPC_HANDLE_SIZE);

}  // namespace

void writeHandle(ShareKind kind, const Share& share, char (&handle)[CU_IPC_HANDLE_SIZE]) {
  const Carried carried{kMagic, static_cast<uint32_t>(kind), 0, share};
  std::memset(handle, 0, sizeof handle);
  std::memcpy(handle, &carried, sizeof carried);
}

bool readHandle(ShareKind kind, const char (&handle)[CU_IPC_HANDLE_SIZE], Share& share) {
  Carried carried;
  std::memcpy(&carried, handle, sizeof carried);
  share = carried.share;
  return carried.is(kind);
}

int makeDescriptor(ShareKind kind, const Share& share) {
  const Carried carried{kMagic, static_cast<uint32_t>(kind), 0, share};
  const int descriptor = memfd_create("gpupool-memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) return -1;
  if (write(descriptor, &carried, sizeof carried) == ssize_t{sizeof carried} &&
      fcntl(descriptor, F_ADD_SEALS, kSeals) == 0)
    return descriptor;
  close(descriptor);
  return -1;
}

// Sealed: it is a file of memory, and reading it does not wait for anybody.
bool readDescriptor(ShareKind kind, int descriptor, Share& share) {
  if ((fcntl(descriptor, F_GET_SEALS) & kSeals) != kSeals || fcntl(descriptor, F_GET_SEALS) < 0) return false;
  Carried carried;
  if (pread(descriptor, &carried, sizeof carried, 0) != ssize_t{sizeof carried}) return false;
  share = carried.share;
  return carried.is(kind);
}

bool OfferedAllocations::find(const Allocation& allocation, schema::ShareToken& token) {
  std::lock_guard lock(mutex_);
  const auto found = tokens_.find(allocation.bufferId);
  if (found != tokens_.end()) token = found->second;
  return found != tokens_.end();
}

CUresult OfferedAllocations::offered(const Allocation& allocation, schema::ShareToken& token,
                                     const std::function<CUresult(schema::ShareToken&)>& offer) {
  std::lock_guard one(offering_);
  if (find(allocation, token)) return CUDA_SUCCESS;
  const CUresult status = offer(token);
  if (status != CUDA_SUCCESS) return status;
  std::lock_guard lock(mutex_);
  tokens_[allocation.bufferId] = token;
  any_.store(true, std::memory_order_relaxed);
  return CUDA_SUCCESS;
}

void OfferedAllocations::freed(const Allocation& allocation) {
  if (!any()) return;
  schema::ShareToken token;
  {
    std::lock_guard lock(mutex_);
    const auto found = tokens_.find(allocation.bufferId);
    if (found == tokens_.end()) return;
    token = found->second;
    tokens_.erase(found);
  }
  Session::get().await<"sessionOfferEnd">(allocation.context, token);
}

OfferedAllocations& offeredAllocations() {
  static auto* all = new OfferedAllocations;
  return *all;
}

}  // namespace gpupool::client
