#include "server/front/held_notes.h"

#include <algorithm>
#include <string>

#include "base/log.h"
#include "server/files/manifest.h"
#include "server/front/beside.h"

namespace gpupool::server {
namespace {

// The files got their place with the manifest; restoring checks them whole.
bool isWhole(const CheckpointFolder& folder, const NotedHold& note) {
  try {
    const Manifest manifest = decodeManifest(folder.read(note.folder, kManifestName, kMostManifestBytes));
    return manifest.held && manifest.id == note.checkpoint && manifest.lease == note.lease;
  } catch (const std::exception& error) {
    GPUPOOL_WARNING("lease %s was to be held in %s when this server ended, and is not: %s",
                    note.lease.text().c_str(), note.folder.c_str(), error.what());
    return false;
  }
}

}  // namespace

HeldNotes::HeldNotes(const std::vector<NotedHold>& earlier) {
  for (const NotedHold& one : earlier) notes_[one.lease] = {{one.checkpoint, one.folder, one.server}, true};
}

void HeldNotes::write(const Id& lease, const HeldFiles& files) {
  notes_[lease] = {files, false};
  changed_();
}

void HeldNotes::erase(const Id& lease) {
  if (notes_.erase(lease) != 0) changed_();
}

std::vector<NotedHold> HeldNotes::all() const {
  std::vector<NotedHold> list;
  list.reserve(notes_.size());
  for (const auto& [lease, note] : notes_)
    list.push_back({lease, note.files.checkpoint, note.files.folder, note.files.server});
  return list;
}

kj::Promise<void> HeldNotes::look(kj::Timer& timer, std::shared_ptr<const CheckpointFolder> folder,
                                  kj::Duration bound) {
  if (notes_.empty()) return kj::READY_NOW;
  if (folder == nullptr) {
    keep({});
    return kj::READY_NOW;
  }
  auto whole = std::make_shared<std::vector<Id>>();
  auto looked = beside<bool>([folder, whole, earlier = all()] {
    for (const NotedHold& note : earlier)
      if (isWhole(*folder, note)) whole->push_back(note.lease);
    return true;
  });
  return timer.timeoutAfter(bound, kj::mv(looked))
      .then([this, whole](bool) { keep(*whole); },
            [this](kj::Exception&& error) {
              GPUPOOL_ERROR("leases that were to be held in files when this server ended are given up: %s",
                            error.getDescription().cStr());
              keep({});
            });
}

void HeldNotes::keep(const std::vector<Id>& whole) {
  const size_t dropped = std::erase_if(notes_, [&](const auto& one) {
    return one.second.earlier && std::find(whole.begin(), whole.end(), one.first) == whole.end();
  });
  if (dropped != 0) changed_();
}

const HeldFiles* HeldNotes::found(const Id& lease) const {
  const auto at = notes_.find(lease);
  return at == notes_.end() || !at->second.earlier ? nullptr : &at->second.files;
}

std::vector<Id> HeldNotes::found() const {
  std::vector<Id> list;
  for (const auto& [lease, note] : notes_)
    if (note.earlier) list.push_back(lease);
  return list;
}

}  // namespace gpupool::server
