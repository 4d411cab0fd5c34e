from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("protocol_version", "client_name")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    client_name: str
    def __init__(self, protocol_version: _Optional[int] = ..., client_name: _Optional[str] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("instance_id", "agent_name", "agent_metadata", "pool_address", "capacity_bytes", "publication_ttl_s", "lease_ttl_max_s", "http_address")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_NAME_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    POOL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PUBLICATION_TTL_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MAX_S_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    agent_name: str
    agent_metadata: bytes
    pool_address: int
    capacity_bytes: int
    publication_ttl_s: float
    lease_ttl_max_s: float
    http_address: str
    def __init__(self, instance_id: _Optional[str] = ..., agent_name: _Optional[str] = ..., agent_metadata: _Optional[bytes] = ..., pool_address: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., publication_ttl_s: _Optional[float] = ..., lease_ttl_max_s: _Optional[float] = ..., http_address: _Optional[str] = ...) -> None: ...

class OpenDomainRequest(_message.Message):
    __slots__ = ("record", "member", "loads", "publishes", "decodes_only", "converts", "client_name")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHES_FIELD_NUMBER: _ClassVar[int]
    DECODES_ONLY_FIELD_NUMBER: _ClassVar[int]
    CONVERTS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    record: bytes
    member: str
    loads: bool
    publishes: bool
    decodes_only: bool
    converts: bool
    client_name: str
    def __init__(self, record: _Optional[bytes] = ..., member: _Optional[str] = ..., loads: _Optional[bool] = ..., publishes: _Optional[bool] = ..., decodes_only: _Optional[bool] = ..., converts: _Optional[bool] = ..., client_name: _Optional[str] = ...) -> None: ...

class OtherDomain(_message.Message):
    __slots__ = ("domain_id", "field", "ours", "theirs", "loaders", "publishers", "converters")
    DOMAIN_ID_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    OURS_FIELD_NUMBER: _ClassVar[int]
    THEIRS_FIELD_NUMBER: _ClassVar[int]
    LOADERS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHERS_FIELD_NUMBER: _ClassVar[int]
    CONVERTERS_FIELD_NUMBER: _ClassVar[int]
    domain_id: str
    field: str
    ours: str
    theirs: str
    loaders: int
    publishers: int
    converters: int
    def __init__(self, domain_id: _Optional[str] = ..., field: _Optional[str] = ..., ours: _Optional[str] = ..., theirs: _Optional[str] = ..., loaders: _Optional[int] = ..., publishers: _Optional[int] = ..., converters: _Optional[int] = ...) -> None: ...

class OpenDomainReply(_message.Message):
    __slots__ = ("domain_id", "loaders", "publishers", "elsewhere", "decode_loaders")
    DOMAIN_ID_FIELD_NUMBER: _ClassVar[int]
    LOADERS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHERS_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    DECODE_LOADERS_FIELD_NUMBER: _ClassVar[int]
    domain_id: str
    loaders: int
    publishers: int
    elsewhere: _containers.RepeatedCompositeFieldContainer[OtherDomain]
    decode_loaders: int
    def __init__(self, domain_id: _Optional[str] = ..., loaders: _Optional[int] = ..., publishers: _Optional[int] = ..., elsewhere: _Optional[_Iterable[_Union[OtherDomain, _Mapping]]] = ..., decode_loaders: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("domain_id", "boundary_hashes", "above_tokens", "lease_s", "wait_s", "peek", "follow_up", "repeat", "lease_name")
    DOMAIN_ID_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_HASHES_FIELD_NUMBER: _ClassVar[int]
    ABOVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    PEEK_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_UP_FIELD_NUMBER: _ClassVar[int]
    REPEAT_FIELD_NUMBER: _ClassVar[int]
    LEASE_NAME_FIELD_NUMBER: _ClassVar[int]
    domain_id: str
    boundary_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    above_tokens: int
    lease_s: float
    wait_s: float
    peek: bool
    follow_up: bool
    repeat: bool
    lease_name: str
    def __init__(self, domain_id: _Optional[str] = ..., boundary_hashes: _Optional[_Iterable[bytes]] = ..., above_tokens: _Optional[int] = ..., lease_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., peek: _Optional[bool] = ..., follow_up: _Optional[bool] = ..., repeat: _Optional[bool] = ..., lease_name: _Optional[str] = ...) -> None: ...

class Match(_message.Message):
    __slots__ = ("boundary", "kinds", "consumable", "reason", "age_s", "producer", "field", "domain_id", "also_in", "retained", "hash_matched", "hits")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    CONSUMABLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_ID_FIELD_NUMBER: _ClassVar[int]
    ALSO_IN_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    HASH_MATCHED_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    boundary: int
    kinds: _containers.RepeatedScalarFieldContainer[str]
    consumable: bool
    reason: str
    age_s: float
    producer: str
    field: str
    domain_id: str
    also_in: _containers.RepeatedScalarFieldContainer[str]
    retained: bool
    hash_matched: bool
    hits: int
    def __init__(self, boundary: _Optional[int] = ..., kinds: _Optional[_Iterable[str]] = ..., consumable: _Optional[bool] = ..., reason: _Optional[str] = ..., age_s: _Optional[float] = ..., producer: _Optional[str] = ..., field: _Optional[str] = ..., domain_id: _Optional[str] = ..., also_in: _Optional[_Iterable[str]] = ..., retained: _Optional[bool] = ..., hash_matched: _Optional[bool] = ..., hits: _Optional[int] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("matches", "lease_id", "waited_s", "attention_tokens", "recurrent_tokens")
    MATCHES_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECURRENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    matches: _containers.RepeatedCompositeFieldContainer[Match]
    lease_id: str
    waited_s: float
    attention_tokens: int
    recurrent_tokens: int
    def __init__(self, matches: _Optional[_Iterable[_Union[Match, _Mapping]]] = ..., lease_id: _Optional[str] = ..., waited_s: _Optional[float] = ..., attention_tokens: _Optional[int] = ..., recurrent_tokens: _Optional[int] = ...) -> None: ...

class Key(_message.Message):
    __slots__ = ("rank", "group", "block_hash")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    rank: int
    group: int
    block_hash: bytes
    def __init__(self, rank: _Optional[int] = ..., group: _Optional[int] = ..., block_hash: _Optional[bytes] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("lease_id", "keys")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    keys: _containers.RepeatedCompositeFieldContainer[Key]
    def __init__(self, lease_id: _Optional[str] = ..., keys: _Optional[_Iterable[_Union[Key, _Mapping]]] = ...) -> None: ...

class Location(_message.Message):
    __slots__ = ("offset", "nbytes", "checksum")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    offset: int
    nbytes: int
    checksum: int
    def __init__(self, offset: _Optional[int] = ..., nbytes: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class LocateReply(_message.Message):
    __slots__ = ("locations",)
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    locations: _containers.RepeatedCompositeFieldContainer[Location]
    def __init__(self, locations: _Optional[_Iterable[_Union[Location, _Mapping]]] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("lease_id", "lease_s")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    lease_s: float
    def __init__(self, lease_id: _Optional[str] = ..., lease_s: _Optional[float] = ...) -> None: ...

class RenewLeaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseLeaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("domain_id", "boundary", "block_hash", "ttl_s")
    DOMAIN_ID_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    domain_id: str
    boundary: int
    block_hash: bytes
    ttl_s: float
    def __init__(self, domain_id: _Optional[str] = ..., boundary: _Optional[int] = ..., block_hash: _Optional[bytes] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class AnnounceReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Want(_message.Message):
    __slots__ = ("key", "nbytes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    key: Key
    nbytes: int
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., nbytes: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("domain_id", "publication_id", "wants")
    DOMAIN_ID_FIELD_NUMBER: _ClassVar[int]
    PUBLICATION_ID_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    domain_id: str
    publication_id: str
    wants: _containers.RepeatedCompositeFieldContainer[Want]
    def __init__(self, domain_id: _Optional[str] = ..., publication_id: _Optional[str] = ..., wants: _Optional[_Iterable[_Union[Want, _Mapping]]] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("status", "offset", "token")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATUS_UNSPECIFIED: _ClassVar[Grant.Status]
        GRANTED: _ClassVar[Grant.Status]
        PRESENT: _ClassVar[Grant.Status]
        BUSY: _ClassVar[Grant.Status]
        FULL: _ClassVar[Grant.Status]
        OVER_BUDGET: _ClassVar[Grant.Status]
    STATUS_UNSPECIFIED: Grant.Status
    GRANTED: Grant.Status
    PRESENT: Grant.Status
    BUSY: Grant.Status
    FULL: Grant.Status
    OVER_BUDGET: Grant.Status
    STATUS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    status: Grant.Status
    offset: int
    token: int
    def __init__(self, status: _Optional[_Union[Grant.Status, str]] = ..., offset: _Optional[int] = ..., token: _Optional[int] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("grants", "instance_id")
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    grants: _containers.RepeatedCompositeFieldContainer[Grant]
    instance_id: str
    def __init__(self, grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ..., instance_id: _Optional[str] = ...) -> None: ...

class Written(_message.Message):
    __slots__ = ("key", "token", "checksum")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    key: Key
    token: int
    checksum: int
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., token: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("boundary", "hashes", "kinds", "producer", "user_turn", "flops_per_token", "flops_per_pair")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    USER_TURN_FIELD_NUMBER: _ClassVar[int]
    FLOPS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FLOPS_PER_PAIR_FIELD_NUMBER: _ClassVar[int]
    boundary: int
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    kinds: _containers.RepeatedScalarFieldContainer[str]
    producer: str
    user_turn: bool
    flops_per_token: float
    flops_per_pair: float
    def __init__(self, boundary: _Optional[int] = ..., hashes: _Optional[_Iterable[bytes]] = ..., kinds: _Optional[_Iterable[str]] = ..., producer: _Optional[str] = ..., user_turn: _Optional[bool] = ..., flops_per_token: _Optional[float] = ..., flops_per_pair: _Optional[float] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("domain_id", "publication_id", "rank", "written", "manifest")
    DOMAIN_ID_FIELD_NUMBER: _ClassVar[int]
    PUBLICATION_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    domain_id: str
    publication_id: str
    rank: int
    written: _containers.RepeatedCompositeFieldContainer[Written]
    manifest: Manifest
    def __init__(self, domain_id: _Optional[str] = ..., publication_id: _Optional[str] = ..., rank: _Optional[int] = ..., written: _Optional[_Iterable[_Union[Written, _Mapping]]] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("visible", "missing")
    VISIBLE_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    visible: bool
    missing: _containers.RepeatedCompositeFieldContainer[Key]
    def __init__(self, visible: _Optional[bool] = ..., missing: _Optional[_Iterable[_Union[Key, _Mapping]]] = ...) -> None: ...

class AbandonRequest(_message.Message):
    __slots__ = ("publication_id", "still_written")
    PUBLICATION_ID_FIELD_NUMBER: _ClassVar[int]
    STILL_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    publication_id: str
    still_written: bool
    def __init__(self, publication_id: _Optional[str] = ..., still_written: _Optional[bool] = ...) -> None: ...

class AbandonReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("publication_ids",)
    PUBLICATION_IDS_FIELD_NUMBER: _ClassVar[int]
    publication_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, publication_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class KeepAliveReply(_message.Message):
    __slots__ = ("unknown",)
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    unknown: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, unknown: _Optional[_Iterable[str]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("instance_id", "capacity_bytes", "used_bytes", "objects", "checkpoints", "leases", "publications", "domains", "counters", "gauges")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PUBLICATIONS_FIELD_NUMBER: _ClassVar[int]
    DOMAINS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    capacity_bytes: int
    used_bytes: int
    objects: int
    checkpoints: int
    leases: int
    publications: int
    domains: int
    counters: _containers.ScalarMap[str, int]
    gauges: _containers.ScalarMap[str, int]
    def __init__(self, instance_id: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., objects: _Optional[int] = ..., checkpoints: _Optional[int] = ..., leases: _Optional[int] = ..., publications: _Optional[int] = ..., domains: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., gauges: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ("domain_id", "limit", "domain_prefix", "kinds", "age_min_s", "age_max_s", "visibilities", "cursor", "prefix_hashes", "hits_min")
    DOMAIN_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_PREFIX_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    AGE_MIN_S_FIELD_NUMBER: _ClassVar[int]
    AGE_MAX_S_FIELD_NUMBER: _ClassVar[int]
    VISIBILITIES_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    HITS_MIN_FIELD_NUMBER: _ClassVar[int]
    domain_id: str
    limit: int
    domain_prefix: str
    kinds: _containers.RepeatedScalarFieldContainer[str]
    age_min_s: float
    age_max_s: float
    visibilities: _containers.RepeatedScalarFieldContainer[str]
    cursor: str
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    hits_min: int
    def __init__(self, domain_id: _Optional[str] = ..., limit: _Optional[int] = ..., domain_prefix: _Optional[str] = ..., kinds: _Optional[_Iterable[str]] = ..., age_min_s: _Optional[float] = ..., age_max_s: _Optional[float] = ..., visibilities: _Optional[_Iterable[str]] = ..., cursor: _Optional[str] = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ..., hits_min: _Optional[int] = ...) -> None: ...

class CheckpointInfo(_message.Message):
    __slots__ = ("domain_id", "boundary", "block_hash", "kinds", "state_bytes", "attention_bytes", "age_s", "idle_s", "leases", "producer", "visibility", "hits", "common_tokens")
    DOMAIN_ID_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    COMMON_TOKENS_FIELD_NUMBER: _ClassVar[int]
    domain_id: str
    boundary: int
    block_hash: bytes
    kinds: _containers.RepeatedScalarFieldContainer[str]
    state_bytes: int
    attention_bytes: int
    age_s: float
    idle_s: float
    leases: int
    producer: str
    visibility: str
    hits: int
    common_tokens: int
    def __init__(self, domain_id: _Optional[str] = ..., boundary: _Optional[int] = ..., block_hash: _Optional[bytes] = ..., kinds: _Optional[_Iterable[str]] = ..., state_bytes: _Optional[int] = ..., attention_bytes: _Optional[int] = ..., age_s: _Optional[float] = ..., idle_s: _Optional[float] = ..., leases: _Optional[int] = ..., producer: _Optional[str] = ..., visibility: _Optional[str] = ..., hits: _Optional[int] = ..., common_tokens: _Optional[int] = ...) -> None: ...

class ListCheckpointsReply(_message.Message):
    __slots__ = ("checkpoints", "next_cursor")
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_CURSOR_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[CheckpointInfo]
    next_cursor: str
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[CheckpointInfo, _Mapping]]] = ..., next_cursor: _Optional[str] = ...) -> None: ...

class ListDomainsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DomainClient(_message.Message):
    __slots__ = ("name", "opened_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPENED_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    opened_s: float
    def __init__(self, name: _Optional[str] = ..., opened_s: _Optional[float] = ...) -> None: ...

class DomainInfo(_message.Message):
    __slots__ = ("domain_id", "record", "clients", "idle_s", "checkpoints", "kinds", "objects", "object_bytes")
    class KindsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DOMAIN_ID_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    OBJECT_BYTES_FIELD_NUMBER: _ClassVar[int]
    domain_id: str
    record: bytes
    clients: _containers.RepeatedCompositeFieldContainer[DomainClient]
    idle_s: float
    checkpoints: int
    kinds: _containers.ScalarMap[str, int]
    objects: int
    object_bytes: int
    def __init__(self, domain_id: _Optional[str] = ..., record: _Optional[bytes] = ..., clients: _Optional[_Iterable[_Union[DomainClient, _Mapping]]] = ..., idle_s: _Optional[float] = ..., checkpoints: _Optional[int] = ..., kinds: _Optional[_Mapping[str, int]] = ..., objects: _Optional[int] = ..., object_bytes: _Optional[int] = ...) -> None: ...

class ListDomainsReply(_message.Message):
    __slots__ = ("domains",)
    DOMAINS_FIELD_NUMBER: _ClassVar[int]
    domains: _containers.RepeatedCompositeFieldContainer[DomainInfo]
    def __init__(self, domains: _Optional[_Iterable[_Union[DomainInfo, _Mapping]]] = ...) -> None: ...
