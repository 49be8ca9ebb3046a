// The functions that answer with one figure of a GPU: schema/nvml_figures.def.
#include "client/nvml/answers.h"

using gpupool::nvml::answer;
using gpupool::nvml::give;
using gpupool::nvml::When;
using gpupool::schema::NvmlFigures;

#define FIGURE(when, function, type, member)                                                          \
  NVML_EXPORT nvmlReturn_t function(nvmlDevice_t device, type* out) {                                 \
    return answer<When::when>(device, out != nullptr,                                                 \
                              [&](const NvmlFigures& figures) { return give(figures.member, out); }); \
  }
#define FIGURE_PAIR(when, function, type, member)                                         \
  NVML_EXPORT nvmlReturn_t function(nvmlDevice_t device, type* first, type* second) {     \
    return answer<When::when>(                                                            \
        device, first != nullptr && second != nullptr,                                    \
        [&](const NvmlFigures& figures) { return give(figures.member, first, second); }); \
  }
#define FIGURE_BY(when, function, argument, count, type, member)                                         \
  NVML_EXPORT nvmlReturn_t function(nvmlDevice_t device, argument which, type* out) {                    \
    const auto i = static_cast<unsigned>(which);                                                         \
    return answer<When::when>(device, out != nullptr && i < count,                                       \
                              [&](const NvmlFigures& figures) { return give(figures.member[i], out); }); \
  }
#define FIGURE_BY_TWO(when, function, argument, count, second, seconds, type, member)                       \
  NVML_EXPORT nvmlReturn_t function(nvmlDevice_t device, argument which, second other, type* out) {         \
    const auto i = static_cast<unsigned>(which), j = static_cast<unsigned>(other);                          \
    return answer<When::when>(device, out != nullptr && i < count && j < seconds,                           \
                              [&](const NvmlFigures& figures) { return give(figures.member[i][j], out); }); \
  }
#define FIGURE_TEXT(function, member)                                                                       \
  NVML_EXPORT nvmlReturn_t function(nvmlDevice_t device, char* out, unsigned room) {                        \
    return answer<When::Fact>(device, out != nullptr,                                                       \
                              [&](const NvmlFigures& figures) { return give(figures.member, out, room); }); \
  }
#include "schema/nvml_figures.def"
