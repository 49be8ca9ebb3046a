// The fields of `gpupool smi`: nvidia-smi's names.
#include <set>

#include "catch.h"
#include "pool-manager/cli/smi_fields.h"

using namespace gpupool::cli;

TEST_CASE("fields have nvidia-smi's names, each once") {
  std::set<std::string> names;
  for (const SmiField& field : smiFields()) {
    CHECK(names.insert(field.name).second);
    CHECK(findSmiField(field.name) == &field);
    for (const char* other : field.otherNames) {
      CHECK(names.insert(other).second);
      CHECK(findSmiField(other) == &field);
    }
  }
  for (const char* usual : {"index",
                            "name",
                            "gpu_name",
                            "uuid",
                            "utilization.gpu",
                            "utilization.memory",
                            "memory.total",
                            "memory.used",
                            "memory.free",
                            "temperature.gpu",
                            "power.draw",
                            "power.limit",
                            "clocks.sm",
                            "clocks.mem",
                            "pci.bus_id",
                            "driver_version",
                            "compute_cap",
                            "pstate",
                            "ecc.errors.uncorrected.volatile.total",
                            "timestamp"})
    CHECK(findSmiField(usual) != nullptr);
  CHECK(findSmiField("nonsense") == nullptr);
  CHECK(findSmiField("") == nullptr);
}

TEST_CASE("a heading has the full name and the unit") {
  CHECK(smiHeading(*findSmiField("clocks.sm")) == "clocks.current.sm [MHz]");
  CHECK(smiHeading(*findSmiField("gpu_name")) == "name");
  CHECK(smiHeading(*findSmiField("memory.used")) == "memory.used [MiB]");
}
