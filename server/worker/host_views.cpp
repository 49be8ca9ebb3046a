#include "server/worker/host_views.h"

#include <unistd.h>

#include <stdexcept>

#include "base/log.h"
#include "schema/frame.h"
#include "server/arena_mmap.h"

namespace gpupool::server {
namespace {

constexpr size_t kContextBytes = size_t{2} << 20;  // the driver's smallest piece: none of it is for others
constexpr size_t kFirstCopyBytes = size_t{64} << 10;

std::shared_ptr<transport::SharedMemory> mappedAgain(const transport::SharedMemory& memory) {
  const int descriptor = dup(memory.descriptor());
  if (descriptor < 0) throw std::runtime_error("no descriptor for another view of host memory");
  return transport::SharedMemory::adopt(descriptor, memory.size());
}

}  // namespace

HostViews::HostViews(const Driver& driver, HostPages pages) : driver_(driver), pages_(std::move(pages)) {
  HostView& first = views_.emplace_back();
  first.staging = pages_.staging;
  first.words = pages_.words;
  first.context = pages_.registeredIn;
}

HostViews::~HostViews() {
  for (HostView& view : views_) {
    if (view.context == nullptr || driver_.cuCtxPushCurrent_v2(view.context) != CUDA_SUCCESS) continue;
    driver_.cuMemHostUnregister(view.staging->data());
    driver_.cuMemHostUnregister(view.words->data());
    driver_.cuCtxPopCurrent_v2(&view.context);
  }
}

void HostViews::contextAhead(CUcontext context) {
  std::lock_guard lock(mutex_);
  registerHostPages(driver_, context, pages_);
  views_.front().context = pages_.registeredIn;
}

void HostViews::contextMade(CUcontext context) {
  if (driver_.software() || driver_.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS) return;
  const PlaceGlobals place;
  const HostView* view = of(context);
  if (view != nullptr && isFirst(context))
    if (const CUresult result = copyFirst(*view); result != CUDA_SUCCESS)
      GPUPOOL_WARNING("a context could not be prepared: %s", driver_.describe(result).c_str());
  driver_.cuCtxPopCurrent_v2(&context);
}

bool HostViews::isFirst(CUcontext context) {
  std::lock_guard lock(mutex_);
  return made_.insert(context).second;
}

// The device's memory stays the context's, so that nothing comes to lie there that would not in another one.
CUresult HostViews::copyFirst(const HostView& view) {
  CUdeviceptr own = 0;
  std::byte* scratch = view.words->data() + schema::kWordsScratch;
  CUresult result = driver_.cuMemAlloc_v2(&own, kContextBytes);
  if (result == CUDA_SUCCESS)
    result = driver_.cuMemcpyHtoDAsync_v2(own, view.staging->data(), kFirstCopyBytes, nullptr);
  if (result == CUDA_SUCCESS)
    result =
        driver_.cuMemcpyDtoHAsync_v2(scratch, own, schema::kWordsOffset - schema::kWordsScratch, nullptr);
  const CUresult finished = driver_.cuStreamSynchronize(nullptr);
  return result == CUDA_SUCCESS ? finished : result;
}

const HostView* HostViews::of(CUcontext context) {
  std::lock_guard lock(mutex_);
  HostView* view = nullptr;
  for (HostView& known : views_)
    if (known.context == context) view = &known;
  if (view == nullptr) view = vacant();
  if (view != nullptr && (view->context != context || view->deviceWords == 0)) registerIn(*view, context);
  return view;
}

// Under mutex_. One that is free, or another one.
HostView* HostViews::vacant() {
  for (HostView& known : views_)
    if (known.context == nullptr) return &known;
  try {
    auto staging = mappedAgain(*pages_.staging), words = mappedAgain(*pages_.words);
    HostView& made = views_.emplace_back();
    made.staging = std::move(staging);
    made.words = std::move(words);
    return &made;
  } catch (const std::exception& e) {
    GPUPOOL_WARNING("a context cannot be used: %s", e.what());
    return nullptr;
  }
}

// Under mutex_. The device's address is asked for now: after a device fault the driver would not answer any
// more.
void HostViews::registerIn(HostView& view, CUcontext context) {
  view.context = context;
  view.deviceWords = 0;
  for (const auto& memory : {view.staging, view.words}) {
    CUresult result = driver_.cuMemHostRegister_v2(memory->data(), memory->size(), kHostRegistration);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
      GPUPOOL_WARNING("%zu bytes of host memory stay unregistered: %s", memory->size(),
                      driver_.describe(result).c_str());
  }
  CUdeviceptr address = 0;
  if (driver_.cuMemHostGetDevicePointer_v2(&address, view.words->data(), 0) == CUDA_SUCCESS)
    view.deviceWords = address;
}

void HostViews::contextEnded(CUcontext context) {
  std::lock_guard lock(mutex_);
  for (HostView& view : views_)
    if (view.context == context) view.context = nullptr;
  made_.erase(context);
}

uint64_t HostViews::translate(const HostView* view, uint64_t host) const {
  const uint64_t start = reinterpret_cast<uint64_t>(staging()->data());
  if (view == nullptr || host < start || host - start >= staging()->size()) return host;
  return reinterpret_cast<uint64_t>(view->staging->data()) + (host - start);
}

}  // namespace gpupool::server
