#pragma once

#include <fcntl.h>

#include "tests/support/mappings.h"
#include "tests/support/worker/loop_harness.h"

namespace bulkhead::worker::test {

/// A worker whose clients return slabs and lend others.
class SlabTest : public LoopTest {
protected:
    static constexpr std::uint64_t both = wire::feature_lending | wire::feature_returning;

    void return_slab(TestClient& client, std::uint32_t id) { client.send(channel::encode(channel::SlabReturn{id})); }
    void release(TestClient& client, const wire::LeaseRef& lease) {
        channel::Release message;
        message.leases.push_back(lease);
        client.send(channel::encode(message));
    }
    /// A result of so many bytes, which stays leased.
    wire::LeaseRef fill(TestClient& client, std::uint64_t request_id, std::uint64_t bytes) {
        client.infer(request_id, "fill", {}, {{"bytes", bytes}});
        const channel::InferResult result = client.expect_result(request_id);
        return result.tensors.empty() ? wire::LeaseRef{} : result.tensors[0].lease;
    }
    std::uint32_t expect_withdrawn(TestClient& client) {
        const auto message = client.receive_answer();
        if (message && std::holds_alternative<channel::SlabWithdraw>(*message))
            return std::get<channel::SlabWithdraw>(*message).slab_id;
        ADD_FAILURE() << "no slab_withdraw";
        return 0;
    }
    /// Until the worker's own slabs take so many bytes.
    void await_slab_bytes(std::uint64_t bytes) {
        await("what the slabs take", bytes,
              [](const auto& told) { return number(told.at("slabs").as_object(), "bytes"); });
    }
    /// Until this process, test and worker in one, maps slabs of this label so often.
    void await_mapped(std::string_view label, std::size_t times) {
        await(label, times, [label](const auto&) { return bulkhead::test::mappings(label); });
    }
};

/// Another worker's output slab, as its client has it: a descriptor.
struct ForeignSlab {
    static constexpr std::uint64_t size_bytes = 64 * 1024;
    explicit ForeignSlab(const std::string& label = "foreign",
                         wire::SlabDirection direction = wire::SlabDirection::output) {
        const HostSlab slab = HostSlab::create(size_bytes, direction, label).value();
        const std::span<float> values{reinterpret_cast<float*>(slab.bytes().data()), size_bytes / sizeof(float)};
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
        memfd = UniqueFd{::fcntl(slab.fd(), F_DUPFD_CLOEXEC, 0)};
    }
    /// Floats [first, first + count) of it, as a lease of a loan.
    static channel::Tensor tensor(std::uint32_t slab_id, std::uint64_t first, std::int64_t count) {
        return {"x",
                wire::DType::float32,
                {count},
                {slab_id, 0, first * sizeof(float), static_cast<std::uint64_t>(count) * sizeof(float), 5}};
    }
    UniqueFd memfd;
};

}  // namespace bulkhead::worker::test
