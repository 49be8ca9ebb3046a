#include "client/memory/mapped_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>

namespace gpupool::client {
namespace {

using transport::Descriptor;

bool isFileOf(const Mapping& mapping, const struct stat& status) {
  return S_ISREG(status.st_mode) && status.st_dev == mapping.device && status.st_ino == mapping.inode;
}

// Looks before it opens: what else has that name now may be a pipe or a device, which notice an open.
Descriptor openFile(const std::string& path, const Mapping& mapping) {
  struct stat status;
  if (stat(path.c_str(), &status) != 0 || !isFileOf(mapping, status)) return Descriptor();
  Descriptor file(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!file || fstat(file.get(), &status) != 0 || !isFileOf(mapping, status)) return Descriptor();
  return file;
}

// One that the program has open: files without a name, and those whose name is not this process's.
Descriptor openAgain(const Mapping& mapping) {
  const std::unique_ptr<DIR, int (*)(DIR*)> all(opendir("/proc/self/fd"), &closedir);
  if (all == nullptr) return Descriptor();
  while (const dirent* entry = readdir(all.get())) {
    struct stat status;
    if (fstat(std::atoi(entry->d_name), &status) != 0 || !isFileOf(mapping, status)) continue;
    if (Descriptor file = openFile("/proc/self/fd/" + std::string(entry->d_name), mapping)) return file;
  }
  return Descriptor();
}

// The kernel's own link to the file comes first: it needs no name. But it takes a privilege in most places.
Descriptor openMapped(const Mapping& mapping) {
  char link[80];
  std::snprintf(link, sizeof link, "/proc/self/map_files/%" PRIx64 "-%" PRIx64, mapping.start, mapping.end);
  Descriptor file = openFile(link, mapping);
  if (!file) file = openFile(mapping.path, mapping);
  return file ? std::move(file) : openAgain(mapping);
}

}  // namespace

std::optional<Mapping> parseMapping(std::string_view line) {
  Mapping mapping;
  char mode[5] = {};
  unsigned major = 0, minor = 0;
  int path = 0;
  const std::string text(line);
  if (std::sscanf(text.c_str(), "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %x:%x %" SCNu64 " %n",
                  &mapping.start, &mapping.end, mode, &mapping.offset, &major, &minor, &mapping.inode,
                  &path) != 7)
    return std::nullopt;
  mapping.readable = mode[0] == 'r';
  mapping.writable = mode[1] == 'w';
  mapping.shared = mode[3] == 's';
  mapping.device = makedev(major, minor);
  mapping.path = text.substr(static_cast<size_t>(path));
  return mapping;
}

std::optional<Mapping> mappingAt(uint64_t address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (auto mapping = parseMapping(line); mapping && address < mapping->end) return mapping;
  return std::nullopt;
}

bool isSegmentOfNccl(const Mapping& mapping) {
  return mapping.shared && mapping.path.starts_with("/dev/shm/nccl-");
}

std::optional<MappedFile> mappedFile(uint64_t address, size_t bytes) {
  const auto mapping = mappingAt(address);
  if (!mapping || address < mapping->start || bytes > mapping->end - address || mapping->inode == 0 ||
      !mapping->shared || !mapping->readable || !mapping->writable)
    return std::nullopt;
  MappedFile file{openMapped(*mapping), mapping->offset + (address - mapping->start)};
  return file.descriptor ? std::optional(std::move(file)) : std::nullopt;
}

}  // namespace gpupool::client
