#pragma once

/// The channel's messages as owning values. `parse_…` copies a packet's bytes once, checks the copy
/// and returns only valid messages; `encode` is the inverse. Layout: `ipc/channel/wire.json`;
/// description: `docs/channel.md`.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include <boost/json.hpp>

#include "ipc/base/error.h"
#include "ipc/channel/tensor_layout.h"
#include "ipc/channel/wire.h"

namespace bulkhead::channel {

/// A checked descriptor: dtype known, name printable, `lease.size_bytes` matches dims and dtype.
/// The owner of the slab table checks that the lease lies in its slab (`check_placement`).
struct Tensor {
    std::string name;
    wire::DType dtype{};
    Dims dims;
    wire::LeaseRef lease{};
    std::uint32_t event_id = 0;  ///< see wire::TensorDescriptor
};

using Tensors = std::vector<Tensor>;

// Client → worker

struct Hello {
    std::uint64_t features = 0;
    std::string client;  ///< may be empty
    wire::GpuUuid gpu{};
};

struct SlabRequest {
    std::uint64_t request_id = 0;
    wire::SlabDirection direction = wire::SlabDirection::input;
    wire::SlabKind kind = wire::SlabKind::host_memfd;
    std::uint64_t size_bytes = 0;  ///< not 0
};

struct Infer {
    std::uint64_t request_id = 0;
    std::string method{};
    std::chrono::milliseconds deadline{0};  ///< from receipt; 0: the model's default
    bool retry_safe = false;
    Tensors tensors{};
    boost::json::object parameters{};
};

struct Cancel {
    std::uint64_t request_id = 0;
};

struct Release {
    std::vector<wire::LeaseRef> leases;
};

/// Brings one descriptor.
struct SlabLend {
    std::uint64_t request_id = 0;
    std::uint32_t slab_id = 0;  ///< at least wire::lent_slab_id_min
    wire::SlabKind kind = wire::SlabKind::host_memfd;
    std::uint64_t size_bytes = 0;  ///< not 0
};

struct SlabReturn {
    std::uint32_t slab_id = 0;
};

using ClientMessage = std::variant<Hello, SlabRequest, Infer, Cancel, Release, SlabLend, SlabReturn>;

// Worker → client

struct Welcome {
    std::uint16_t slab_count = 0;  ///< slab_offers that follow
    std::uint32_t in_flight_max = 0;
    std::uint64_t features = 0;
    std::uint64_t generation = 0;
    std::uint64_t channel = 0;
    std::uint64_t slab_bytes_max = 0;  ///< all slabs of the channel together
    std::uint32_t replica = 0;
    std::string model{};
    boost::json::object methods{};
};

struct SlabOffer {
    std::uint64_t request_id = 0;  ///< of the slab_request; 0 for the offers after welcome
    std::uint32_t slab_id = 0;
    wire::SlabDirection direction = wire::SlabDirection::input;
    wire::SlabKind kind = wire::SlabKind::host_memfd;
    std::uint64_t size_bytes = 0;
    wire::CudaIpcHandle handle{};  ///< only of kind cuda_ipc; other kinds bring a descriptor
};

struct InferResult {
    std::uint64_t request_id = 0;
    bool more = false;
    Tensors tensors{};
    boost::json::object values{};  ///< results that are not tensors; usually empty
    std::chrono::microseconds queued{0};
    std::chrono::microseconds run{0};
};

struct Failure {
    std::uint64_t request_id = 0;  ///< 0: concerns the channel
    Error error;
};

struct Closing {
    ErrorCode code = ErrorCode::worker_draining;
    std::chrono::milliseconds deadline{0};
};

/// Brings wire::ring_offer_fds descriptors.
struct RingOffer {
    std::uint32_t cells_to_worker = 0;
    std::uint32_t cells_to_client = 0;
    std::uint64_t size_bytes = 0;
};

struct SlabAccepted {
    std::uint64_t request_id = 0;
    std::uint32_t slab_id = 0;
};

struct SlabWithdraw {
    std::uint32_t slab_id = 0;
};

struct EventOffer {
    std::uint32_t event_id = 0;  ///< not 0
    bool from_worker = false;
    wire::CudaIpcHandle handle{};
};

using WorkerMessage =
    std::variant<Welcome, SlabOffer, InferResult, Failure, Closing, RingOffer, SlabAccepted, SlabWithdraw, EventOffer>;

/// Why a client's packet was refused.
struct Refusal {
    Error error;
    /// 0: the packet breaks the protocol: answer `Failure{0, error}`, then close the channel.
    /// Otherwise only this request is bad: answer `Failure{request_id, error}` and go on.
    std::uint64_t request_id = 0;

    [[nodiscard]] bool closes_channel() const noexcept { return request_id == 0; }
};

/// Found by argument-dependent lookup from `boost::system::result`.
[[noreturn]] inline void throw_exception_from_error(const Refusal& refusal, const boost::source_location& where) {
    bulkhead::throw_exception_from_error(refusal.error, where);
}

/// Returns the first message of a packet that holds several; all bytes of any other packet.
[[nodiscard]] std::span<const std::byte> first_message(std::span<const std::byte> packet) noexcept;

/// For the worker. Faults of a request: shape_mismatch, dtype_unsupported, input_invalid.
[[nodiscard]] boost::system::result<ClientMessage, Refusal> parse_from_client(std::span<const std::byte> packet);

/// For the client. Any invalid field breaks the protocol.
[[nodiscard]] Result<WorkerMessage> parse_from_worker(std::span<const std::byte> packet);

// One packet each. Errors, if a Result is returned: input_invalid or shape_mismatch: a name too
// long for its field, too many tensors, more than wire::json_bytes_max of JSON.

[[nodiscard]] std::vector<std::byte> encode(const Hello& message);  ///< cuts a long client name
[[nodiscard]] std::vector<std::byte> encode(const SlabRequest& message);
[[nodiscard]] Result<std::vector<std::byte>> encode(const Infer& message);
[[nodiscard]] std::vector<std::byte> encode(const Cancel& message);
/// At most `release_leases_max` leases.
[[nodiscard]] std::vector<std::byte> encode(const Release& message);
[[nodiscard]] std::vector<std::byte> encode(const SlabLend& message);
[[nodiscard]] std::vector<std::byte> encode(const SlabReturn& message);
[[nodiscard]] Result<std::vector<std::byte>> encode(const Welcome& message);
[[nodiscard]] std::vector<std::byte> encode(const SlabOffer& message);
[[nodiscard]] Result<std::vector<std::byte>> encode(const InferResult& message);
/// Cuts long text, cleans unprintable text.
[[nodiscard]] std::vector<std::byte> encode(const Failure& message);
[[nodiscard]] std::vector<std::byte> encode(const Closing& message);
[[nodiscard]] std::vector<std::byte> encode(const RingOffer& message);
[[nodiscard]] std::vector<std::byte> encode(const SlabAccepted& message);
[[nodiscard]] std::vector<std::byte> encode(const SlabWithdraw& message);
[[nodiscard]] std::vector<std::byte> encode(const EventOffer& message);

using wire::release_leases_max;
/// Bounds an error's attempt and its remedy, each.
inline constexpr std::size_t error_text_bytes_max = 8 * 1024;

}  // namespace bulkhead::channel
