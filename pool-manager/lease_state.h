#pragma once
// A lease's life:
//
//               held ◄───────┬───────────┐
//                ▲ ▼         │           │
//   queued ─► granting ─► active ◄─► suspended
//                 │         ▲ │           │
//                 │         ▼ │           │
//                 │      moving           │
//                 ▼           ▼           ▼
//                      revoking              ─►  released | expired | revoked | lost
//
// granting: its server is being told. moving: it has a second placement, where its sessions are to go, and
// has both until they are on one of them. held: its sessions are in files, or with its holder since its
// server is gone, and it is nowhere; granting comes next when it is to be restored, and then active while its
// sessions are rebuilt. revoking: its server is
// being told that it ends; its devices are not free. released: by its holder. expired: its holder did not
// renew it, or died. revoked: the manager took it back. lost: its server went away, refused it, or does not
// say that it has ended it.

#include <cstdint>
#include <string_view>

namespace gpupool::pool {

// As in the store (store.capnp).
enum class LeaseState : uint32_t {
  queued,
  granting,
  active,
  suspended,
  moving,
  revoking,
  released,
  expired,
  revoked,
  lost,
  held
};
inline constexpr uint32_t kLeaseStates = 11;

constexpr bool isEnd(LeaseState state) { return state >= LeaseState::released && state <= LeaseState::lost; }

// Whether a lease in state `from` may be in state `to` next.
constexpr bool mayFollow(LeaseState from, LeaseState to) {
  using enum LeaseState;
  switch (from) {
    case queued:
      return to == granting || to == released || to == revoked;
    case granting:
      return to == active || to == held || to == revoking || to == lost;
    case active:
      return to == suspended || to == moving || to == held || to == revoking || to == lost;
    case held:
      return to == granting || to == revoking;
    case suspended:
      return to == active || to == held || to == revoking || to == lost;
    case moving:
      return to == active || to == revoking || to == lost;
    case revoking:
      return isEnd(to);
    case released:
    case expired:
    case revoked:
    case lost:
      break;
  }
  return false;
}

constexpr std::string_view name(LeaseState state) {
  constexpr std::string_view kNames[kLeaseStates] = {"queued",  "granting", "active",   "suspended",
                                                     "moving",  "revoking", "released", "expired",
                                                     "revoked", "lost",     "held"};
  return kNames[static_cast<uint32_t>(state)];
}

}  // namespace gpupool::pool
