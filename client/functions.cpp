#include "client/functions.h"

#include <algorithm>

#include "client/objects.h"
#include "client/session.h"

namespace gpupool::client {

namespace {
constexpr size_t kMaxParameters = 4096;
}

bool KernelState::setLayout(Layout layout) {
  std::lock_guard lock(mutex_);
  if (laidOut_.load(std::memory_order_relaxed)) return true;  // others may be packing by it right now
  if (!packer_.setLayout(layout)) return false;
  layout_ = std::move(layout);
  laidOut_.store(true, std::memory_order_release);
  return true;
}

void KernelState::attributesChange() {
  std::lock_guard lock(mutex_);
  revision_.fetch_add(1, std::memory_order_acq_rel);
  lastAccepted_.store(0, std::memory_order_release);
  accepted_.clear();
  infos_.clear();
  answers_.clear();
}

bool KernelState::accepted(uint64_t launch) {
  if (lastAccepted_.load(std::memory_order_acquire) == launch) return true;
  std::lock_guard lock(mutex_);
  const bool known = std::find(accepted_.begin(), accepted_.end(), launch) != accepted_.end();
  if (known) lastAccepted_.store(launch, std::memory_order_release);
  return known;
}

void KernelState::accept(uint64_t launch, uint64_t revision) {
  std::lock_guard lock(mutex_);
  if (revision_.load(std::memory_order_relaxed) != revision) return;
  add(accepted_, launch);
  lastAccepted_.store(launch, std::memory_order_release);
}

bool KernelState::findInfo(const Place& place, schema::FunctionInfo& info) {
  std::lock_guard lock(mutex_);
  for (const Info& known : infos_)
    if (known.place == place) {
      info = known.info;
      return true;
    }
  return false;
}

void KernelState::keepInfo(const Place& place, const schema::FunctionInfo& info, uint64_t revision) {
  std::lock_guard lock(mutex_);
  if (place.version != 0 && revision_.load(std::memory_order_relaxed) == revision) add(infos_, {place, info});
}

bool KernelState::isSet(const Setting& setting) {
  std::lock_guard lock(mutex_);
  return std::any_of(settings_.begin(), settings_.end(), [&](const Setting& known) {
    return known.place == setting.place && known.attribute == setting.attribute &&
           known.value == setting.value;
  });
}

void KernelState::noteSetting(const Setting& setting) {
  std::lock_guard lock(mutex_);
  std::erase_if(settings_, [&](const Setting& known) {
    return known.device == setting.device && known.attribute == setting.attribute;
  });
  if (setting.place.version != 0) add(settings_, setting);
}

bool KernelState::findAnswer(const Question& question, uint64_t& answer) {
  std::lock_guard lock(mutex_);
  for (const auto& known : answers_)
    if (known.first == question) {
      answer = known.second;
      return true;
    }
  return false;
}

void KernelState::keepAnswer(const Question& question, uint64_t answer, uint64_t revision) {
  std::lock_guard lock(mutex_);
  if (revision_.load(std::memory_order_relaxed) == revision) add(answers_, {question, answer});
}

Function* findFunction(CUfunction handle) {
  const uint64_t id = toId(handle);
  if (Function* function = kernels.find(id)) return function;
  return functions.find(id);
}

Context* homeOf(const Function& function, Context* current) {
  return function.context != nullptr ? contexts().find(function.context) : current;
}

CUresult functionInfo(CUfunction handle, Function& function, const Context* context, CUdevice device,
                      schema::FunctionInfo& info) {
  KernelState& state = *function.state;
  const bool here = context != nullptr && context->device == device;  // elsewhere, it may be reset unseen
  const KernelState::Place place{here ? context->version.load() : 0, toId(handle)};
  if (here && state.findInfo(place, info)) return CUDA_SUCCESS;
  KernelState::Layout layout(kMaxParameters);
  size_t count = layout.size();
  const uint64_t revision = state.revision();
  const CUcontext in = context != nullptr ? context->handle : nullptr;
  CUresult status =
      Session::get().await<"sessionFunctionInfo">(in, handle, device, &info, layout.data(), &count);
  if (status != CUDA_SUCCESS) return status;
  layout.resize(std::min(count, layout.size()));
  if (!state.setLayout(std::move(layout))) return CUDA_ERROR_NOT_SUPPORTED;
  state.keepInfo(place, info, revision);
  return CUDA_SUCCESS;
}

CUresult describe(CUfunction handle, Function& function, const Context* context) {
  schema::FunctionInfo unused;
  return function.state->laidOut()
             ? CUDA_SUCCESS
             : functionInfo(handle, function, context, context != nullptr ? context->device : 0, unused);
}

CUresult loadIn(const Context& context, CUfunction handle, Function& function) {
  schema::FunctionInfo unused;
  return functionInfo(handle, function, &context, context.device, unused);
}

CUresult functionName(CUfunction handle, Function& function, CUcontext context, const char** name) {
  if (!function.nameKnown.load(std::memory_order_acquire)) {
    char text[4096] = {};
    CUresult status = Session::get().await<"sessionFunctionName">(context, handle, static_cast<char*>(text),
                                                                  int{sizeof text});
    if (status != CUDA_SUCCESS) return status;
    std::lock_guard lock(function.mutex);
    if (!function.nameKnown.load()) function.name = text;
    function.nameKnown.store(true, std::memory_order_release);
  }
  *name = function.name.c_str();
  return CUDA_SUCCESS;
}

static CUfunction knownFunction(Function& kernel, uint64_t life) {
  std::lock_guard lock(kernel.mutex);
  for (const auto& [known, function] : kernel.functions)
    if (known == life) return function;
  return nullptr;
}

CUresult functionIn(Context& context, CUkernel kernel, CUfunction* out) {
  Function* entry = kernels.find(toId(kernel));
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const uint64_t life = context.id.load();
  *out = knownFunction(*entry, life);
  if (*out != nullptr) return CUDA_SUCCESS;
  if (Session::inHostFunction()) return CUDA_ERROR_NOT_PERMITTED;
  std::lock_guard asking(entry->asking);  // the worker names a function once
  *out = knownFunction(*entry, life);
  if (*out != nullptr) return CUDA_SUCCESS;
  const auto made = functions.prepare();
  if (made.object == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  auto handle = fromId<CUfunction>(made.id);
  const CUresult status = Session::get().await<"cuKernelGetFunction">(context.handle, &handle, kernel);
  if (status != CUDA_SUCCESS) {
    functions.discard(made.id);
    return status;
  }
  Function& function = *made.object;
  function.kernel = kernel;
  function.library = entry->library;
  function.name = entry->name;
  function.nameKnown = entry->nameKnown.load();
  function.context = context.handle;
  function.life = life;
  function.state = entry->state;
  functions.publish(made.id);
  std::lock_guard lock(entry->mutex);
  entry->functions.emplace_back(life, handle);
  *out = handle;
  return CUDA_SUCCESS;
}

void notePrinting(const Function& function) {
  Session& session = Session::get();
  if (session.printing()) return;
  const bool ofLibrary = handles::kindOf(function.library) == Kind::library;
  const Library* owner = ofLibrary ? libraries.find(function.library) : modules.find(function.library);
  if (owner != nullptr && owner->printing) session.setPrinting();
}

}  // namespace gpupool::client
