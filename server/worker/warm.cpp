#include "server/worker/warm.h"

#include <sys/mman.h>

#include "schema/frame.h"

namespace gpupool::server {
namespace {

constexpr size_t kStagingBytes = size_t{64} << 20;

std::shared_ptr<transport::SharedMemory> present(size_t bytes) {
  auto memory = transport::SharedMemory::create(bytes);
#ifdef MADV_POPULATE_WRITE
  madvise(memory->data(), memory->size(), MADV_POPULATE_WRITE);  // an older kernel touches them later
#endif
  return memory;
}

}  // namespace

HostPages makeHostPages() { return {present(kStagingBytes), present(schema::kWordsBytes), nullptr}; }

void registerHostPages(const Driver& driver, CUcontext context, HostPages& pages) {
  if (driver.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS) return;
  for (const auto& memory : {pages.staging, pages.words})
    driver.cuMemHostRegister_v2(memory->data(), memory->size(), kHostRegistration);
  pages.registeredIn = context;
  driver.cuCtxPopCurrent_v2(&context);
}

void exchangeHostPages(const Driver& driver, const HostPages& own, HostPages& pages) {
  CUcontext context = own.registeredIn;
  if (driver.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS) {
    for (const auto& memory : {own.staging, own.words}) driver.cuMemHostUnregister(memory->data());
    driver.cuCtxPopCurrent_v2(&context);
  }
  registerHostPages(driver, own.registeredIn, pages);
}

}  // namespace gpupool::server
