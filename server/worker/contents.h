#pragma once
// What a session holds besides its record: variables of modules and arrays, which are the driver's; and, for
// tests, digests of all of it, as one worker sees it and the next one has to.
//
// While everything stands still; the calling thread's context may be another one afterwards.

#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "server/worker/checksum.h"
#include "server/worker/session.h"

namespace gpupool::server {

struct Variable {
  uint64_t owner = 0;
  uint64_t context = 0;  // 0: its code is loaded in none (unloadedManaged): the host reads it
  std::string name;
  CUdeviceptr address = 0;
  size_t bytes = 0;
};
struct ArrayState {
  uint64_t id = 0, context = 0;
  unsigned levels = 0;  // of a mipmapped array; 0: it is none
  uint64_t bytes = 0;
};
struct Contents {
  std::vector<Variable> variables;
  std::vector<ArrayState> arrays;
};

std::string hex(uint64_t value);

// "" or why they cannot be read.
std::string findContents(Session& session, Contents& contents);
// One after the other, first the variables. take: "" or why to end with that.
using TakeContent = std::function<std::string(const std::string& name, std::span<const std::byte> bytes)>;
std::string readContents(Session& session, const Contents& contents, const TakeContent& take);

using Digests = std::map<std::string, Checksum>;
// What stands for memory of the host, which a program that shares it may write at any time: its bytes; where
// both workers have it by the same descriptors, its identity; or nothing, and it is left out.
enum class HostDigests : uint8_t { ofBytes, ofIdentity, none };
inline constexpr char kWordsDigest[] = "words";  // of host memory the one that is always there
// Of each of the session's contents, by a name for people: device memory, variables, arrays; words (without
// their header), staging and pinned memory. Behind Space::takeStock. "" or why not.
std::string contentDigests(Session& session, const Contents& contents, HostDigests hostBy, Digests& digests);

// All of it to host memory, or from it; its context is current.
CUresult copyArray(const Driver& driver, CUarray array, std::span<std::byte> bytes, bool out);
// How much that is; 0: it cannot be copied.
uint64_t arrayBytes(const Driver& driver, CUarray array);
// The level arrays of a mipmapped array, or the array itself.
std::vector<CUarray> levelsOf(const Driver& driver, Objects& objects, uint64_t id, unsigned levels);

// The variable of a module or library in the current context. False: the driver finds none of that name.
bool findVariable(Session& session, uint64_t owner, const std::string& name, CUdeviceptr& address,
                  size_t& bytes);

}  // namespace gpupool::server
