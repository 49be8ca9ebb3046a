#pragma once
// NVML's answers to the questions of schema/nvml_figures.def, from a library that was loaded already and
// initialised. A function that it lacks counts as NVML_ERROR_NOT_SUPPORTED. One thread.

#include <span>
#include <string>
#include <unordered_map>

#include "schema/nvml_figures.h"

namespace gpupool::health {

class NvmlQuestions {
 public:
  explicit NvmlQuestions(void* library) : library_(library) {}

  void system(schema::NvmlFigures& to);  // the driver's versions
  void facts(nvmlDevice_t device, schema::NvmlFigures& to);
  void live(nvmlDevice_t device, schema::NvmlFigures& to);
  schema::FigurePair between(nvmlDevice_t device, nvmlDevice_t other);

 private:
  // Each has its fieldId and scopeId.
  void askFields(nvmlDevice_t device, std::span<nvmlFieldValue_t> fields);
  // Null: the library has none.
  void* find(const char* name);
  template <class... Arguments>
  nvmlReturn_t ask(const char* name, Arguments... arguments);
  template <bool live>
  void table(nvmlDevice_t device, schema::NvmlFigures& to);

  void* library_;
  std::unordered_map<std::string, void*> found_;
};

}  // namespace gpupool::health
