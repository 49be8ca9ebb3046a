#pragma once
// The folder in which a server keeps the checkpoints of its leases, each a folder in it. Names come from
// users: what they name lies in the folder, whatever links there are. Several servers may share one; files
// are the server's own (modes 0700 and 0600).
//
// A checkpoint is written under a name of its own, put on the disk, and gets its place by one rename: it is
// whole, or not there. What a server that was killed has left is removed when it starts again.
//
// Every call may take as long as the disk does. Any thread; one at a time for each object.

#include <set>
#include <span>
#include <string>
#include <vector>

#include "server/images/image_cache.h"  // Descriptor

namespace gpupool::server {

class CheckpointFolder {
 public:
  // path: absolute. server: its name, of those that share the folder.
  CheckpointFolder(std::string path, std::string server)
      : path_(std::move(path)), server_(std::move(server)) {}

  // The name in the folder of what somebody calls `name`: relative, or absolute beginning with the folder's
  // path. Throws std::runtime_error, for people, as all that follow.
  std::string within(const std::string& name) const;
  std::string pathOf(const std::string& name) const { return path_ + "/" + within(name); }
  // Of checkpoints that this server was writing when it ended.
  void removeLeftovers() const;

  // One that is being written.
  class Draft {
   public:
    ~Draft();  // removes what has no place yet
    Draft(Draft&&) = default;
    Draft& operator=(Draft&&) = delete;
    // A new file, to be written; its name has no '/'.
    Descriptor create(const std::string& file);
    // All files are on the disk. The last one is written, and the checkpoint gets its place.
    void publish(const std::string& lastFile, std::span<const std::byte> bytes);

   private:
    friend class CheckpointFolder;
    Draft() = default;
    Descriptor root_, place_, folder_;  // the checkpoint's place is in `place_`
    void refuseStrangers() const;
    std::string draft_, name_;        // its names, in root_ and in place_
    std::string path_;                // for people
    std::set<std::string> replaced_;  // the files of the one that has its place; empty: there is none
  };
  // Fails if there is such a name already, or the folder that is to have it is not there. replaced: instead,
  // if there is none: the two change places, and the old one, whose files these are, is removed. It fails if
  // somebody has put anything else there, which nobody would find again.
  Draft begin(const std::string& name, std::set<std::string> replaced = {}) const;

  // The file of a checkpoint that is there. Only a plain file.
  Descriptor open(const std::string& name, const std::string& file) const;
  std::vector<std::byte> read(const std::string& name, const std::string& file, uint64_t most) const;

 private:
  Descriptor openRoot() const;
  // The folder of that name, step by step.
  Descriptor descend(const std::string& relative) const;
  std::string draftPrefix() const { return ".new-" + server_ + "-"; }

  std::string path_, server_;
};

}  // namespace gpupool::server
