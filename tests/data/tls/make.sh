#!/usr/bin/env bash
# Makes the certificates that tests use. The keys are no secret: nothing else trusts what they sign.
set -euo pipefail
cd "$(dirname "$0")"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

authority() {  # NAME
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500 \
    -subj "/CN=kvxfer tests $1" -keyout "$work/$1.key" -out "$1.pem" 2>/dev/null
}

certificate() {  # NAME AUTHORITY ALTERNATIVE-NAMES FIRST-DAY LAST-DAY
  openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$1" \
    -keyout "$1.key" -out "$work/$1.csr" 2>/dev/null
  : >"$work/index" && rm -rf "$work/new" && mkdir "$work/new"
  cat >"$work/config" <<END
[ca]
default_ca = tests
[tests]
database = $work/index
new_certs_dir = $work/new
rand_serial = yes
default_md = sha256
policy = any
x509_extensions = names
[any]
commonName = supplied
[names]
subjectAltName = $3
END
  openssl ca -batch -notext -config "$work/config" -cert "$2.pem" -keyfile "$work/$2.key" \
    -startdate "${4}000000Z" -enddate "${5}000000Z" -in "$work/$1.csr" -out "$1.pem" 2>/dev/null
}

here=IP:127.0.0.1,IP:::1,DNS:localhost
authority ca
authority other-ca
certificate agent ca "$here" 20250101 21240101
certificate expired ca "$here" 20200101 20200201
certificate elsewhere ca DNS:elsewhere.example 20250101 21240101
certificate stranger other-ca "$here" 20250101 21240101
openssl ec -aes256 -passout pass:kvxfer -in agent.key -out encrypted.key 2>/dev/null
