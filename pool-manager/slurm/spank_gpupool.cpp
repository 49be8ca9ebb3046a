// spank_gpupool.so: Slurm's options --remote-gpus and --remote-gpu-mem, and what a job's tasks need to use
// what they reserve (docs/slurm.md).
//
// Three programs of Slurm load it. srun, sbatch and salloc ask it for the options, and let it refuse them.
// slurmctld sees the options as environment, in job_submit.lua and in the prolog that makes the claims
// (etc/slurm/). slurmstepd calls it for each task, as the job's user, just before the task begins: the task
// gets the name of its node's claim, and the client library in front of LD_LIBRARY_PATH. At its first CUDA
// call the library adopts the claim, as it does for GPUPOOL_CLAIM anywhere: nothing is kept here.
//
// Arguments in plugstack.conf: library=FOLDER of libcuda.so.1, manager=ADDRESS (else client.yaml has it).

#include <unistd.h>

#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "schema/lease_memory.h"

extern "C" {
#include <slurm/spank.h>
}

namespace {

constexpr size_t kMostText = 1 << 20;  // of one variable
constexpr unsigned long kMostGpus = gpupool::schema::kMostLeasedDevices;

bool isName(std::string_view text) {
  for (const char one : text)
    if (std::isalnum(static_cast<unsigned char>(one)) == 0 && std::strchr("._-", one) == nullptr)
      return false;
  return !text.empty() && text.size() <= 40;
}

// All digits, and at least 1.
bool isCount(std::string_view text, unsigned long most) {
  if (text.empty() || text.size() > 7 || text[0] == '0') return false;
  for (const char one : text)
    if (one < '0' || one > '9') return false;
  return std::strtoul(std::string(text).c_str(), nullptr, 10) <= most;
}

bool isWish(std::string_view text) {
  const size_t colon = text.find(':');
  return isCount(text.substr(0, colon), kMostGpus) &&
         (colon == std::string_view::npos || isName(text.substr(colon + 1)));
}

bool isSize(std::string_view text) {
  if (text.ends_with("iB")) text.remove_suffix(2);
  return !text.empty() && std::strchr("MGT", text.back()) != nullptr &&
         isCount(text.substr(0, text.size() - 1), 9'999'999);
}

// Slurm calls these where the command line is read, and again in slurmstepd; whoever bypasses them (the
// options are environment) meets the same checks in the prolog.
bool gpusWanted = false, sizeWanted = false;
int takeWish(int, const char* text, int) {
  gpusWanted = true;
  if (text != nullptr && isWish(text)) return 0;
  slurm_error("--remote-gpus: '%s' is not N or N:MODEL (N: 1 to %lu), for example 2 or 2:h200",
              text ? text : "", kMostGpus);
  return -1;
}
int takeSize(int, const char* text, int) {
  sizeWanted = true;
  if (text != nullptr && isSize(text)) return 0;
  slurm_error("--remote-gpu-mem: '%s' is not a size, for example 20G or 512M", text ? text : "");
  return -1;
}

char nameOfWish[] = "remote-gpus", wordOfWish[] = "N[:MODEL]",
     helpOfWish[] = "GPUs of the pool (gpupool) for each node of the job";
char nameOfSize[] = "remote-gpu-mem", wordOfSize[] = "SIZE",
     helpOfSize[] = "with --remote-gpus: a part of each GPU's memory, for example 20G, instead of whole GPUs";
spank_option wishOption = {nameOfWish, wordOfWish, helpOfWish, 1, 1, takeWish};
spank_option sizeOption = {nameOfSize, wordOfSize, helpOfSize, 1, 2, takeSize};

// Empty: not set.
std::string variable(spank_t spank, const char* name) {
  for (size_t size = 4096; size <= kMostText; size *= 16) {
    std::vector<char> text(size);
    const spank_err_t error = spank_getenv(spank, name, text.data(), static_cast<int>(size));
    if (error == ESPANK_SUCCESS) return text.data();
    if (error != ESPANK_NOSPACE) break;
  }
  return "";
}

std::string argument(int count, char** words, std::string_view name, const char* otherwise) {
  for (int i = 0; i < count; ++i) {
    const std::string_view word = words[i];
    if (word.size() > name.size() && word.starts_with(name) && word[name.size()] == '=')
      return std::string(word.substr(name.size() + 1));
  }
  return otherwise;
}

// CLUSTER:JOB.NODE:RESTARTS, as the prolog names it. Slurm tells a task of its restart count in its
// environment alone, where it is left out for 0 (spank_get_item says 0 always, as of 22.05).
std::string claimOf(spank_t spank) {
  uint32_t job = 0;
  const std::string cluster = variable(spank, "SLURM_CLUSTER_NAME"),
                    node = variable(spank, "SLURMD_NODENAME");
  if (spank_get_item(spank, S_JOB_ID, &job) != ESPANK_SUCCESS || cluster.empty() || node.empty()) return "";
  const std::string restarts = variable(spank, "SLURM_RESTART_COUNT");
  return cluster + ":" + std::to_string(job) + "." + node + ":" + (restarts.empty() ? "0" : restarts);
}

bool set(spank_t spank, const char* name, const std::string& value) {
  const spank_err_t error = spank_setenv(spank, name, value.c_str(), 1);
  if (error != ESPANK_SUCCESS) slurm_error("gpupool: %s cannot be set: %s", name, spank_strerror(error));
  return error == ESPANK_SUCCESS;
}

// A step's environment comes from its job's script, where the folder is there already.
bool putLibraryFirst(spank_t spank, const std::string& folder) {
  const std::string before = variable(spank, "LD_LIBRARY_PATH");
  if (before == folder || before.starts_with(folder + ":")) return true;
  return set(spank, "LD_LIBRARY_PATH", before.empty() ? folder : folder + ":" + before);
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))
// Declared first: a constant has no linkage in C++ otherwise, and Slurm would not find it.
EXPORTED const char plugin_name[];
EXPORTED const char plugin_type[];
EXPORTED const unsigned int plugin_version;
EXPORTED const unsigned int spank_plugin_version;
SPANK_PLUGIN(gpupool, 1)

EXPORTED int slurm_spank_init(spank_t spank, int, char**) {
  const spank_err_t wish = spank_option_register(spank, &wishOption);
  return wish != ESPANK_SUCCESS ? wish : spank_option_register(spank, &sizeOption);
}

EXPORTED int slurm_spank_init_post_opt(spank_t, int, char**) {
  if (!sizeWanted || gpusWanted) return 0;
  slurm_error("--remote-gpu-mem: say also how many GPUs, for example --remote-gpus=1");
  return -1;
}

EXPORTED int slurm_spank_task_init(spank_t spank, int count, char** words) {
  char* wish = nullptr;
  if (spank_remote(spank) != 1 || spank_option_getopt(spank, &wishOption, &wish) != ESPANK_SUCCESS) return 0;
  const std::string folder = argument(count, words, "library", "/usr/lib/gpupool");
  if (::access((folder + "/libcuda.so.1").c_str(), R_OK) != 0) {
    slurm_error("gpupool: %s/libcuda.so.1 cannot be read on this node; is gpupool-client installed?",
                folder.c_str());
    return -1;
  }
  const std::string claim = claimOf(spank);
  if (claim.empty()) {
    slurm_error("gpupool: Slurm does not say which job and node this is");
    return -1;
  }
  const std::string manager = argument(count, words, "manager", "");
  if (!manager.empty() && !set(spank, "GPUPOOL_MANAGER", manager)) return -1;
  spank_unsetenv(spank, "GPUPOOL_HOLDER");  // of a program around sbatch, on another machine
  return set(spank, "GPUPOOL_CLAIM", claim) && putLibraryFirst(spank, folder) ? 0 : -1;
}
