#include "worker/file/sha256.h"

#include <array>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <openssl/evp.h>

namespace bulkhead::worker {

void Sha256::Free::operator()(evp_md_ctx_st* context) const noexcept { EVP_MD_CTX_free(context); }

Sha256::Sha256() : context_{EVP_MD_CTX_new()} {
    if (!context_ || EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) != 1)
        throw std::runtime_error{"OpenSSL cannot start a SHA-256"};
}

void Sha256::update(std::span<const std::byte> bytes) {
    if (EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) != 1)
        throw std::runtime_error{"OpenSSL cannot continue a SHA-256"};
}

std::string Sha256::hex() {
    std::array<unsigned char, 32> digest{};
    if (EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr) != 1)
        throw std::runtime_error{"OpenSSL cannot finish a SHA-256"};
    return fmt::format("{:02x}", fmt::join(digest, ""));
}

}  // namespace bulkhead::worker
