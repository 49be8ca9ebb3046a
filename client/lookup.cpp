#include "client/lookup.h"

#include <algorithm>
#include <string_view>

#include "client/exports.h"

namespace gpupool::client {
namespace {

struct Variant {
  std::string_view name;
  int version;
  bool perThread;
  std::string_view symbol;
};

constexpr Variant kVariants[] = {
#define PROC(name, version, perThread, symbol) {#name, version, perThread != 0, #symbol},
#include "client/proc_address.def"
#undef PROC
};
static_assert(std::is_sorted(std::begin(kVariants), std::end(kVariants),
                             [](const Variant& a, const Variant& b) { return a.name < b.name; }));

std::span<const Variant> variantsOf(std::string_view name) {
  const auto range = std::equal_range(std::begin(kVariants), std::end(kVariants), Variant{name, 0, false, {}},
                                      [](const Variant& a, const Variant& b) { return a.name < b.name; });
  return {range.first, range.second};
}

void* supportedAddress(std::string_view symbol) {
  const auto all = exports();
  const auto at =
      std::lower_bound(all.begin(), all.end(), symbol,
                       [](const Export& entry, std::string_view name) { return entry.name < name; });
  return at != all.end() && at->name == symbol && at->supported ? at->address : nullptr;
}

struct Answer {
  void* address;
  CUdriverProcAddressQueryResult status;
};

Answer answerFor(std::string_view name, int cudaVersion, bool perThread) {
  const auto variants = variantsOf(name);
  const bool twins = perThread && std::any_of(variants.begin(), variants.end(),
                                              [](const Variant& variant) { return variant.perThread; });
  const Variant* newest = nullptr;
  for (const Variant& variant : variants) {  // ascending versions: the last that fits is the newest
    // Unsigned: a negative version asks for the newest, as natively.
    if (variant.perThread == twins &&
        static_cast<unsigned>(variant.version) <= static_cast<unsigned>(cudaVersion)) {
      newest = &variant;
    }
  }
  if (newest == nullptr) {
    return {nullptr, variants.empty() ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
                                      : CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT};
  }
  // Never an older variant in place of an unsupported newer one: its argument list differs.
  void* address = supportedAddress(newest->symbol);
  return {address, address == nullptr ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS};
}

bool validRequest(const char* name, int cudaVersion, cuuint64_t flags, void** address) {
  constexpr cuuint64_t kKnownFlags =
      CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
  return name != nullptr && address != nullptr && (flags & ~kKnownFlags) == 0 &&
         cudaVersion <= kDriverVersion;
}

// Both flags at once are accepted (measured); the ordinary variant is our reading of them.
bool wantsPerThread(cuuint64_t flags) { return flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM; }

}  // namespace

CUresult lookup(const char* name, int cudaVersion, cuuint64_t flags, void** address,
                CUdriverProcAddressQueryResult* status) {
  if (!validRequest(name, cudaVersion, flags, address)) return CUDA_ERROR_INVALID_VALUE;
  const Answer answer = answerFor(name, cudaVersion, wantsPerThread(flags));
  *address = answer.address;
  if (status != nullptr) *status = answer.status;
  return CUDA_SUCCESS;
}

CUresult lookupOld(const char* name, int cudaVersion, cuuint64_t flags, void** address) {
  if (!validRequest(name, cudaVersion, flags, address)) return CUDA_ERROR_INVALID_VALUE;
  const Answer answer = answerFor(name, cudaVersion, wantsPerThread(flags));
  if (answer.address == nullptr) return CUDA_ERROR_NOT_FOUND;
  *address = answer.address;
  return CUDA_SUCCESS;
}

}  // namespace gpupool::client
