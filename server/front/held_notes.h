#pragma once
// The leases that go into files here, or are in them, and of which the manager may not have stored that yet:
// this server's next life must know them (server_state.h). Where it ends in between, the sessions have left,
// their clients wait to be restored, and the files are all that is left of the lease.
//
// A note is written before the files get their place, and erased when the lease goes on here, or when the
// manager has said that it is here no more. Of the notes of an earlier life those stay whose files are whole;
// the manager is told of them (Membership) until it has said so. Belongs to the event loop's thread.

#include <kj/async-io.h>

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "server/files/checkpoint_folder.h"
#include "server/front/leases.h"
#include "server/front/server_state.h"

namespace gpupool::server {

class HeldNotes {
 public:
  // earlier: of this server's life before.
  explicit HeldNotes(const std::vector<NotedHold>& earlier);
  // Called when there is something else to be stored; returns when it is.
  void onChange(std::function<void()> changed) { changed_ = std::move(changed); }

  void write(const Id& lease, const HeldFiles& files);
  void erase(const Id& lease);
  std::vector<NotedHold> all() const;

  // Drops the earlier life's notes whose files are not whole; all of them where there is no folder (null), or
  // where its disk has not answered within `bound`. Never fails. To be awaited before `found`.
  kj::Promise<void> look(kj::Timer& timer, std::shared_ptr<const CheckpointFolder> folder,
                         kj::Duration bound = 10 * kj::SECONDS);
  // Of an earlier life, and not confirmed by the manager: the lease is held in these. Null: it is not.
  const HeldFiles* found(const Id& lease) const;
  std::vector<Id> found() const;

 private:
  struct Note {
    HeldFiles files;
    bool earlier = false;
  };
  void keep(const std::vector<Id>& whole);

  std::map<Id, Note> notes_;
  std::function<void()> changed_ = [] {};
};

}  // namespace gpupool::server
