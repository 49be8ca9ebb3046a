#pragma once
// How the exported functions answer from a GPU's figures.

#include <cstring>

#include "client/nvml/library.h"

namespace gpupool::nvml {

enum When { Fact, Live };

// pick(figures) is the answer, if the library is initialised, `device` is a GPU of the lease, and `valid`
// says that the other arguments are right.
template <When when, class Pick>
nvmlReturn_t answer(nvmlDevice_t device, bool valid, Pick pick) {
  unsigned index = 0;
  if (const nvmlReturn_t status = Library::get().indexOf(device, &index); status != NVML_SUCCESS)
    return status;
  if (!valid) return NVML_ERROR_INVALID_ARGUMENT;
  schema::NvmlFigures figures;
  if constexpr (when == Live) {
    if (const nvmlReturn_t status = Library::get().live(index, figures); status != NVML_SUCCESS)
      return status;
  } else {
    Library::get().facts(index, figures);
  }
  return pick(figures);
}

template <class T>
nvmlReturn_t give(const schema::Said<T>& said, T* out) {
  if (said.status == NVML_SUCCESS) *out = said.value;
  return said.status;
}
template <class T>
nvmlReturn_t give(const schema::Said<schema::Two<T>>& said, T* first, T* second) {
  if (said.status != NVML_SUCCESS) return said.status;
  *first = said.value.first;
  *second = said.value.second;
  return NVML_SUCCESS;
}
inline nvmlReturn_t giveText(const char* from, char* to, unsigned room) {
  const size_t size = std::strlen(from) + 1;
  if (room < size) return NVML_ERROR_INSUFFICIENT_SIZE;
  std::memcpy(to, from, size);
  return NVML_SUCCESS;
}
inline nvmlReturn_t give(const schema::Said<schema::NvmlText>& said, char* to, unsigned room) {
  return said.status == NVML_SUCCESS ? giveText(said.value.text, to, room) : said.status;
}

}  // namespace gpupool::nvml
