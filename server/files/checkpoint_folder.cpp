#include "server/files/checkpoint_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <sstream>
#include <stdexcept>

#include "base/log.h"
#include "schema/id.h"
#include "server/files/manifest.h"

namespace gpupool::server {
namespace {

constexpr int kFolderFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
constexpr size_t kMostName = 1024;

[[noreturn]] void fail(const std::string& what, int error) {
  throw std::runtime_error(what + ": " + strerror(error));
}

void syncFolder(int folder, const std::string& what) {
  if (fsync(folder) != 0) fail(what, errno);
}

std::vector<std::string> namesIn(int folder) {
  std::vector<std::string> names;
  const int copy = openat(folder, ".", kFolderFlags);
  if (copy < 0) return names;
  const std::unique_ptr<DIR, int (*)(DIR*)> list(fdopendir(copy), closedir);
  if (list == nullptr) {
    close(copy);
    return names;
  }
  while (const dirent* entry = readdir(list.get()))
    if (std::strcmp(entry->d_name, ".") != 0 && std::strcmp(entry->d_name, "..") != 0)
      names.emplace_back(entry->d_name);
  return names;
}

// False: it is there still, with why in errno.
bool removeFolder(int root, const std::string& name) {
  const Descriptor folder(openat(root, name.c_str(), kFolderFlags));
  if (folder >= 0)
    for (const std::string& file : namesIn(folder)) unlinkat(folder, file.c_str(), 0);
  return unlinkat(root, name.c_str(), AT_REMOVEDIR) == 0 || errno == ENOENT;
}

}  // namespace

std::string CheckpointFolder::within(const std::string& name) const {
  if (name.size() > kMostName) throw std::runtime_error("the checkpoint's name is too long");
  const auto unprintable = [](unsigned char byte) { return byte < 0x20 || byte == 0x7f; };
  if (std::any_of(name.begin(), name.end(), unprintable))
    throw std::runtime_error("the checkpoint's name has a character that cannot be printed");
  const std::string relative = name.starts_with(path_ + "/") ? name.substr(path_.size() + 1) : name;
  std::istringstream parts(relative.starts_with("/") ? "" : relative);
  std::string clean;
  for (std::string part; std::getline(parts, part, '/');) {
    if (part.empty()) continue;
    if (part.starts_with(".")) throw std::runtime_error("'" + name + "': no part of it may begin with a '.'");
    clean += (clean.empty() ? "" : "/") + part;
  }
  if (clean.empty())
    throw std::runtime_error("'" + name + "' is not in the server's checkpoint folder, " + path_);
  return clean;
}

Descriptor CheckpointFolder::openRoot() const {
  // The operator's own path: links in it are the operator's.
  Descriptor root(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (root < 0) fail("the server's checkpoint folder, " + path_, errno);
  return root;
}

Descriptor CheckpointFolder::descend(const std::string& relative) const {
  Descriptor folder = openRoot();
  std::istringstream parts(relative);
  for (std::string part; std::getline(parts, part, '/');) {
    Descriptor next(openat(folder, part.c_str(), kFolderFlags));
    if (next < 0) fail(path_ + "/" + relative, errno);
    folder = std::move(next);
  }
  return folder;
}

void CheckpointFolder::removeLeftovers() const {
  const Descriptor root(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (root < 0 || access(path_.c_str(), W_OK | X_OK) != 0) {  // a share may be mounted later
    GPUPOOL_ERROR(
        "--checkpoint-folder: %s: %s; nothing is written there or restored from there until that is mended",
        path_.c_str(), strerror(errno));
    return;
  }
  for (const std::string& name : namesIn(root)) {
    const std::string prefix = draftPrefix();
    // Another server's name may begin with this one's.
    if (!name.starts_with(prefix) || !Id::parse(name.substr(prefix.size()))) continue;
    if (removeFolder(root, name))
      GPUPOOL_INFO("removed what was left of a checkpoint that was being written: %s", name.c_str());
  }
}

CheckpointFolder::Draft CheckpointFolder::begin(const std::string& name,
                                                std::set<std::string> replaced) const {
  const bool replaces = !replaced.empty();
  const std::string relative = within(name);
  const size_t slash = relative.rfind('/');
  Draft draft;
  draft.root_ = openRoot();
  draft.place_ = descend(slash == std::string::npos ? "" : relative.substr(0, slash));
  draft.name_ = slash == std::string::npos ? relative : relative.substr(slash + 1);
  struct stat there{};
  if (fstatat(draft.place_, kManifestName, &there, AT_SYMLINK_NOFOLLOW) == 0)
    throw std::runtime_error(path_ + "/" + relative + ": that would lie within another checkpoint");
  const bool taken = fstatat(draft.place_, draft.name_.c_str(), &there, AT_SYMLINK_NOFOLLOW) == 0;
  if (taken && !replaces)
    throw std::runtime_error(path_ + "/" + relative + ": " + strerror(EEXIST) + "; choose another name");
  if (!taken && replaces) fail(path_ + "/" + relative, errno);
  if (replaces && !S_ISDIR(there.st_mode)) fail(path_ + "/" + relative, ENOTDIR);
  draft.path_ = path_ + "/" + relative;
  draft.replaced_ = std::move(replaced);
  draft.refuseStrangers();
  draft.draft_ = draftPrefix() + Id::random().text();
  if (mkdirat(draft.root_, draft.draft_.c_str(), 0700) != 0) {
    const int error = errno;
    draft.draft_.clear();
    fail("a checkpoint cannot be written in " + path_, error);
  }
  draft.folder_ = Descriptor(openat(draft.root_, draft.draft_.c_str(), kFolderFlags));
  if (draft.folder_ < 0) fail("a checkpoint cannot be written in " + path_, errno);
  return draft;
}

void CheckpointFolder::Draft::refuseStrangers() const {
  if (replaced_.empty()) return;
  const Descriptor old(openat(place_, name_.c_str(), kFolderFlags));
  if (old < 0) fail(path_, errno);
  for (const std::string& name : namesIn(old))
    if (!replaced_.contains(name))
      throw std::runtime_error(path_ + " has '" + name +
                               "', which is not of the checkpoint: move it elsewhere");
}

CheckpointFolder::Draft::~Draft() {
  if (root_ < 0 || draft_.empty()) return;
  if (!removeFolder(root_, draft_))
    GPUPOOL_WARNING("what was written of a checkpoint cannot be removed: %s: %s", draft_.c_str(),
                    strerror(errno));
}

Descriptor CheckpointFolder::Draft::create(const std::string& file) {
  Descriptor created(openat(folder_, file.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (created < 0) fail("the checkpoint cannot be written", errno);
  return created;
}

void CheckpointFolder::Draft::publish(const std::string& lastFile, std::span<const std::byte> bytes) {
  const std::string what = "the checkpoint cannot be written";
  const Descriptor last = create(lastFile);
  while (!bytes.empty()) {
    const ssize_t written = ::write(last, bytes.data(), bytes.size());
    if (written < 0 && errno != EINTR) fail(what, errno);
    if (written > 0) bytes = bytes.subspan(static_cast<size_t>(written));
  }
  if (fsync(last) != 0) fail(what, errno);
  syncFolder(folder_, what);
  refuseStrangers();  // that have come meanwhile
  const bool replaces = !replaced_.empty();
  int moved =
      renameat2(root_, draft_.c_str(), place_, name_.c_str(), replaces ? RENAME_EXCHANGE : RENAME_NOREPLACE);
  if (moved != 0 && errno == EINVAL && replaces)
    throw std::runtime_error(what + ": this file system does not exchange two folders at one moment");
  // Not every file system knows that; without it an empty folder of that name goes, and nothing else.
  if (moved != 0 && errno == EINVAL) moved = renameat(root_, draft_.c_str(), place_, name_.c_str());
  if (moved != 0) fail(what, errno);
  // It is done: whoever took a failure from here on for one of the whole would let the sessions go on beside
  // their files. Exchanged, the draft's name is the old one's now.
  if (!replaces) draft_.clear();
  if (fsync(place_) != 0)
    GPUPOOL_WARNING("%s is written, and may not outlive a failure of this machine's power: %s", name_.c_str(),
                    std::strerror(errno));
}

Descriptor CheckpointFolder::open(const std::string& name, const std::string& file) const {
  const Descriptor folder = descend(within(name));
  Descriptor opened(file.find('/') != std::string::npos
                        ? -1
                        : openat(folder, file.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat status{};
  if (opened < 0) fail(pathOf(name) + "/" + file, errno);
  if (fstat(opened, &status) != 0 || !S_ISREG(status.st_mode))
    throw std::runtime_error(pathOf(name) + "/" + file + " is no plain file");
  return opened;
}

std::vector<std::byte> CheckpointFolder::read(const std::string& name, const std::string& file,
                                              uint64_t most) const {
  const Descriptor opened = open(name, file);
  std::vector<std::byte> bytes;
  for (ssize_t got = 1; got != 0 && bytes.size() <= most;) {
    const size_t before = bytes.size();
    bytes.resize(before + 65536);
    got = ::read(opened, bytes.data() + before, 65536);
    if (got < 0) fail(pathOf(name) + "/" + file, errno);
    bytes.resize(before + static_cast<size_t>(got));
  }
  if (bytes.size() > most) throw std::runtime_error(pathOf(name) + "/" + file + " is too long");
  return bytes;
}

}  // namespace gpupool::server
