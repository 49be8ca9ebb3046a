@0xbe22a8421257e69d;
# Who may use the pool, and how much of it: tokens and quotas. Asked of the manager (Manager.administration in pool.capnp),
# which keeps both in its store.

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("gpupool::schema");

# What a token's bearer may do: pool-manager/roles.h has the table.
enum Role { viewer @0; user @1; scheduler @2; server @3; operator @4; }

struct TokenInfo {
  id @0 :Text;                # 16 hexadecimal digits; no secret
  tenant @1 :Text;
  name @2 :Text;              # for people; no two valid tokens of a tenant have the same
  role @3 :Role;
  createdS @4 :UInt64;        # these are since 1970
  expiresS @5 :UInt64;        # 0: never
  usedS @6 :UInt64;           # last; up to a minute late; 0: never
  revokedS @7 :UInt64;        # 0: it has not been
  createdBy @8 :Text;         # on whose word
}

# One token in the manager's store (key "token/<id>"). Nobody can log in with what stands here (token_proof.h).
struct StoredToken {
  info @0 :TokenInfo;
  stored @1 :Data;            # TokenVerifier, 32 bytes each
  manager @2 :Data;
}

# How much of the pool a tenant may have. 0: as much as there is.
struct Quota {
  tenant @0 :Text;            # "*": each tenant that has none of its own
  milliDevices @1 :UInt64;    # at once, in thousandths; a part of a device's memory is that part of a device
  memoryBytes @2 :UInt64;     # of devices, at once
  deviceSeconds @3 :UInt64;   # in each window
  window @4 :QuotaWindow;
  protectMs @5 :UInt32;       # no limit: TurnTerms.protectMs of those of its leases that name nothing else; 0: none
}
enum QuotaWindow { day @0; week @1; month @2; }  # of the calendar, in UTC; weeks begin on Monday

struct QuotaUse {
  quota @0 :Quota;            # all zero but for the tenant: it has none
  milliDevices @1 :UInt64;    # now; what is suspended counts as far as it is on devices
  memoryBytes @2 :UInt64;
  deviceSeconds @3 :UInt64;   # in this window
  windowEndsS @4 :UInt64;     # since 1970
}

# A tenant: whoever has tokens, a quota, leases or requests, or has used something that counts still.
struct TenantUse {
  quota @0 :QuotaUse;         # with the tenant's name
  tokens @1 :UInt32;          # that are good now
  leases @2 :List(LeasesInState);
  claims @3 :UInt32;          # of these leases
  queued @4 :UInt32;          # requests in the queue, those to resume too
  usage @5 :Float64;          # device-seconds, of which half is forgotten in every half-life
}
struct LeasesInState {
  state @0 :Text;             # as Lease.state
  count @1 :UInt32;
}

interface Administration {
  # Operators. The secret is told here, and never again. expiresInS: 0: never. Fails if a valid token of this tenant has
  # this name. by: whose word it is, "user@host"; for people. certificates: of the manager (base/fingerprint.h): lines of
  # the token's file; none: it has no TLS.
  createToken @0 (tenant :Text, name :Text, role :Role, expiresInS :UInt64, by :Text) ->
      (token :TokenInfo, secret :Text, certificates :List(Text));
  tokens @1 () -> (tokens :List(TokenInfo));
  # Returns when the store has it; the token is good for nothing before. Idempotent.
  revokeToken @2 (id :Text, by :Text) -> (token :TokenInfo);
  # Operators. Replaces the tenant's quota, and how its leases are protected; one that is all zero takes it away. Idempotent.
  setQuota @3 (quota :Quota, by :Text) -> ();
  # All, to operators and schedulers; to others their own tenant's.
  quotas @4 () -> (quotas :List(QuotaUse));
  # The same, of all tenants that there are, by name. Its own is there whatever it has.
  tenants @5 () -> (tenants :List(TenantUse));
}
