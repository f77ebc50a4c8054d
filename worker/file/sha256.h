#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

struct evp_md_ctx_st;

namespace bulkhead::worker {

/// A SHA-256 computation.
/// Throws  std::runtime_error if OpenSSL is out of memory or forbids the hash
class Sha256 {
public:
    Sha256();
    void update(std::span<const std::byte> bytes);
    /// Ends the hash. Returns 64 lower-case hexadecimal characters.
    [[nodiscard]] std::string hex();

private:
    struct Free {
        void operator()(evp_md_ctx_st* context) const noexcept;
    };
    std::unique_ptr<evp_md_ctx_st, Free> context_;
};

}  // namespace bulkhead::worker
