#pragma once
// The fields of `gpupool smi --query-gpu`, with nvidia-smi's names, units and words.

#include <string>
#include <vector>

#include "pool-manager/cli/smi_library.h"

namespace gpupool::cli {

struct SmiGpu {
  const NvmlLibrary& nvml;
  nvmlDevice_t device;
  unsigned index;
};

struct SmiField {
  const char* name;                     // as the heading has it
  std::vector<const char*> otherNames;  // that are accepted
  const char* unit;                     // "MiB"; "": none
  // The value without its unit. What the GPU does not tell is "[N/A]"; another error is its text in brackets.
  std::string (*value)(const SmiGpu& gpu);
};

const std::vector<SmiField>& smiFields();
// Null: there is none of that name.
const SmiField* findSmiField(const std::string& name);

// "name [unit]"
std::string smiHeading(const SmiField& field);
// With its unit, if `units` and if there is a value.
std::string smiText(const SmiField& field, const SmiGpu& gpu, bool units);

}  // namespace gpupool::cli
