#include "server/health/questions.h"

#include <dlfcn.h>

namespace gpupool::health {

using schema::NvmlFigures;

void* NvmlQuestions::find(const char* name) {
  const auto [entry, fresh] = found_.try_emplace(name, nullptr);
  if (fresh) entry->second = dlsym(library_, name);
  return entry->second;
}

// The types are those of the arguments, as the rows have them: the header marks some of the functions as
// deprecated, and has later versions in place of others.
template <class... Arguments>
nvmlReturn_t NvmlQuestions::ask(const char* name, Arguments... arguments) {
  const auto function = reinterpret_cast<nvmlReturn_t (*)(Arguments...)>(find(name));
  return function == nullptr ? NVML_ERROR_NOT_SUPPORTED : function(arguments...);
}

void NvmlQuestions::system(NvmlFigures& to) {
  auto& driver = to.driverVersion;
  driver.status = ask("nvmlSystemGetDriverVersion", driver.value.text, unsigned{sizeof driver.value.text});
  auto& nvml = to.nvmlVersion;
  nvml.status = ask("nvmlSystemGetNVMLVersion", nvml.value.text, unsigned{sizeof nvml.value.text});
  to.cudaVersion.status = ask("nvmlSystemGetCudaDriverVersion_v2", &to.cudaVersion.value);
}

enum When { Fact, Live };

template <bool live>
void NvmlQuestions::table(nvmlDevice_t device, NvmlFigures& to) {
#define FIGURE(when, function, type, member) \
  if constexpr ((when == Live) == live) to.member.status = ask(#function, device, &to.member.value);
#define FIGURE_PAIR(when, function, type, member) \
  if constexpr ((when == Live) == live)           \
    to.member.status = ask(#function, device, &to.member.value.first, &to.member.value.second);
#define FIGURE_BY(when, function, argument, count, type, member) \
  if constexpr ((when == Live) == live)                          \
    for (unsigned i = 0; i < count; ++i)                         \
      to.member[i].status = ask(#function, device, static_cast<argument>(i), &to.member[i].value);
#define FIGURE_BY_TWO(when, function, argument, count, second, seconds, type, member)                     \
  if constexpr ((when == Live) == live)                                                                   \
    for (unsigned i = 0; i < count; ++i)                                                                  \
      for (unsigned j = 0; j < seconds; ++j)                                                              \
        to.member[i][j].status = ask(#function, device, static_cast<argument>(i), static_cast<second>(j), \
                                     &to.member[i][j].value);
#define FIGURE_TEXT(function, member)                                                   \
  if constexpr (!live)                                                                  \
    to.member.status = ask(#function, device, static_cast<char*>(to.member.value.text), \
                           unsigned{sizeof to.member.value.text});
#include "schema/nvml_figures.def"
#undef FIGURE
#undef FIGURE_PAIR
#undef FIGURE_BY
#undef FIGURE_BY_TWO
#undef FIGURE_TEXT
}

// Driver 580 leaves alone what does not come to it with NVML_SUCCESS.
void NvmlQuestions::askFields(nvmlDevice_t device, std::span<nvmlFieldValue_t> fields) {
  for (nvmlFieldValue_t& field : fields) {
    const unsigned id = field.fieldId, scope = field.scopeId;
    field = {};
    field.fieldId = id;
    field.scopeId = scope;
  }
  const nvmlReturn_t status =
      ask("nvmlDeviceGetFieldValues", device, static_cast<int>(fields.size()), fields.data());
  if (status == NVML_SUCCESS) return;
  for (nvmlFieldValue_t& field : fields) field.nvmlReturn = status;
}

void NvmlQuestions::facts(nvmlDevice_t device, NvmlFigures& to) {
  table<false>(device, to);
  to.capability.status = ask("nvmlDeviceGetCudaComputeCapability", device, &to.capability.value.first,
                             &to.capability.value.second);
  ask("nvmlDeviceGetPciInfo_v3", device, &to.pci);
  // Links take 0.2 ms each: asked once, as what lies at their ends.
  askFields(device, std::span(to.fields).subspan(std::size(schema::kUnscopedFields)));
}

void NvmlQuestions::live(nvmlDevice_t device, NvmlFigures& to) {
  table<true>(device, to);
  to.memory.status = ask("nvmlDeviceGetMemoryInfo", device, &to.memory.value);
  to.memoryV2.value.version = nvmlMemory_v2;
  to.memoryV2.status = ask("nvmlDeviceGetMemoryInfo_v2", device, &to.memoryV2.value);
  askFields(device, {to.fields, std::size(schema::kUnscopedFields)});
}

schema::FigurePair NvmlQuestions::between(nvmlDevice_t device, nvmlDevice_t other) {
  schema::FigurePair pair;
  for (int i = 0; i < schema::kFigureP2P; ++i)
    pair.p2p[i].status = ask("nvmlDeviceGetP2PStatus", device, other, static_cast<nvmlGpuP2PCapsIndex_t>(i),
                             &pair.p2p[i].value);
  pair.ancestor.status = ask("nvmlDeviceGetTopologyCommonAncestor", device, other, &pair.ancestor.value);
  pair.sameBoard.status = ask("nvmlDeviceOnSameBoard", device, other, &pair.sameBoard.value);
  return pair;
}

}  // namespace gpupool::health
