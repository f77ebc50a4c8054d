#pragma once

#include <span>
#include <string>
#include <vector>

#include <boost/json.hpp>

#include "ipc/base/unique_fd.h"
#include "ipc/channel/channel_codec.h"
#include "ipc/slab/host_slab.h"
#include "tests/support/daemon/daemon.h"

namespace bulkhead::test {

/// A client of a real worker that speaks the channel by hand: right, wrong, or not at all.
class RawChannel {
public:
    /// The socket as `channel.open` hands it out; nothing is said on it yet.
    RawChannel(const Daemon& daemon, const std::string& model);
    /// Says hello, and takes welcome and slabs.
    void greet();

    /// Waits while the socket is full. False when the worker has closed its end, or makes no
    /// room for 30 s.
    bool send(std::span<const std::byte> packet);
    /// The next message; empty at the end of file. Slabs that come are mapped.
    std::optional<channel::WorkerMessage> receive();
    channel::InferResult expect_result();

    /// A float32 tensor `x` of one dimension in the input slab, filled with ones.
    [[nodiscard]] channel::Tensor tensor(std::int64_t count, std::uint64_t offset_bytes = 0);
    bool infer(std::uint64_t request_id, channel::Tensors tensors, boost::json::object parameters = {});
    /// An ordinary request and its answer: the channel works.
    void expect_served(std::uint64_t request_id);

    struct Slab {
        channel::SlabOffer offer;
        HostSlab memory;
    };
    [[nodiscard]] const Slab& slab(wire::SlabDirection direction) const;

private:
    UniqueFd socket_;
    std::vector<Slab> slabs_;
    std::vector<std::byte> buffer_;
};

}  // namespace bulkhead::test
