//! A fleet's objects in etcd: changes by transactions, and copies that follow them.

use std::sync::Arc;

use crate::EtcdError;
use crate::etcd::{LeaseId, Outcome, Transaction, Value, Watch};
use crate::fleet::{Fleet, FleetError};
use crate::object::{Kind, Object};

impl Fleet {
    /// Makes a change of the object at `key`, or none, in one transaction with the check that the
    /// fleet is still the same. `change` gets the object, `None` if there is none, and returns
    /// the one that it should be, `None` to leave it. Called again if the object has changed in
    /// between. Returns the object then.
    ///
    /// The first attempt is made with the object as it was seen last, if that is known.
    pub(crate) fn update<T: Kind + Clone>(
        &self,
        key: &str,
        change: impl Fn(Option<&T>) -> Option<T>,
    ) -> Result<Option<T>, FleetError> {
        self.update_leased(key, None, change)
    }

    /// The same with a lease: etcd removes the object when the lease ends.
    pub(crate) fn update_leased<T: Kind + Clone>(
        &self,
        key: &str,
        lease: Option<LeaseId>,
        change: impl Fn(Option<&T>) -> Option<T>,
    ) -> Result<Option<T>, FleetError> {
        let seen = self.seen(key).filter(|seen| {
            let object = Object::<T>::decode(key, &seen.bytes);
            // It may have changed since, so it is no reason to do nothing.
            object.is_ok_and(|object| change(Some(&object.value)).is_some())
        });
        let (object, value) = self.change_from(key, lease, seen, change)?;
        let mut known = self.known.lock();
        match value {
            Some(value) => known.insert(key.to_owned(), value),
            None => known.remove(key),
        };
        Ok(object)
    }

    /// Keeps nothing of an object that does not change any more.
    pub(crate) fn forget(&self, key: &str) {
        self.known.lock().remove(key);
    }

    /// Makes a change, at first of the object that `found` has. Returns the object then, and its
    /// value in etcd.
    fn change_from<T: Kind + Clone>(
        &self,
        key: &str,
        lease: Option<LeaseId>,
        mut found: Option<Value>,
        change: impl Fn(Option<&T>) -> Option<T>,
    ) -> Result<(Option<T>, Option<Value>), FleetError> {
        let fleet_key = self.prefix().key("fleet");
        loop {
            let object = found.as_ref().map(|found| Object::<T>::decode(key, &found.bytes));
            let object = object.transpose()?;
            let changed = change(object.as_ref().map(|object| &object.value));
            if found.is_some() && changed.is_none() {
                // It was read together with the fleet's object.
                return Ok((object.map(|object| object.value), found));
            }
            let mut transaction = Transaction::new()
                .only_if(&fleet_key, Some(*self.revision.lock()))
                .only_if(key, found.as_ref().map(|found| found.revision))
                .or_read(&fleet_key)
                .or_read(key);
            let bytes = changed.as_ref().map(|value| match object {
                Some(object) => object.with(value.clone()).encode(),
                None => Object::new(value.clone()).encode(),
            });
            if let Some(bytes) = &bytes {
                transaction = transaction.put_leased(key, bytes.clone(), lease);
            }
            let [fleet, now] = match self.etcd().transact(transaction)? {
                Outcome::Done(revision) => {
                    let value = bytes.map(|bytes| Value { bytes, revision });
                    return Ok((changed, value));
                }
                Outcome::Otherwise(values) => values
                    .try_into()
                    .map_err(|_| EtcdError::BadAnswer { what: "pair of values" })?,
            };
            self.check(fleet.as_ref())?;
            found = now;
        }
    }

    /// The object at `key` as this process has seen it last.
    fn seen(&self, key: &str) -> Option<Value> {
        let known = self.known.lock().get(key).cloned();
        let watched = self.watched.lock().values().find_map(|watched| watched.get(key));
        known.into_iter().chain(watched).max_by_key(|value| value.revision)
    }

    /// Follows the objects of a directory such as `migrations/`: [`list`](Self::list) is then
    /// answered by the copy. `changed` is called after each change, from another thread.
    pub(crate) fn follow(
        &self,
        directory: &'static str,
        changed: impl Fn() + Send + Sync + 'static,
    ) -> Watch {
        let watch = self.etcd().watch(self.prefix().key(directory), changed);
        self.watched.lock().insert(directory, Arc::clone(watch.watched()));
        watch
    }

    /// The same as [`list`](Self::list) from the copy, with what this process has written since.
    /// `None` until the directory was read.
    pub(crate) fn followed(&self, directory: &str) -> Option<Vec<(String, Vec<u8>)>> {
        let prefix = self.prefix().key(directory);
        let mut all = self.watched.lock().get(directory)?.all()?;
        let known = self.known.lock();
        for (key, value) in &mut all {
            if let Some(newer) = known.get(key).filter(|known| known.revision > value.revision) {
                *value = newer.clone();
            }
        }
        Some(all.into_iter().map(|(key, value)| (rest(&prefix, &key), value.bytes)).collect())
    }

    /// Removes an object. Nothing happens if there is none.
    pub(crate) fn remove(&self, key: &str) -> Result<(), FleetError> {
        let fleet_key = self.prefix().key("fleet");
        loop {
            let transaction = Transaction::new()
                .only_if(&fleet_key, Some(*self.revision.lock()))
                .delete(key)
                .or_read(&fleet_key);
            match self.etcd().transact(transaction)? {
                Outcome::Done(_) => {
                    self.known.lock().remove(key);
                    return Ok(());
                }
                Outcome::Otherwise(values) => {
                    self.check(values.into_iter().next().flatten().as_ref())?
                }
            }
        }
    }

    /// The objects below a directory such as `hosts/`: the rest of each key, and its bytes.
    pub(crate) fn list(&self, directory: &str) -> Result<Vec<(String, Vec<u8>)>, FleetError> {
        let prefix = self.prefix().key(directory);
        let found = self.etcd().list(&prefix)?;
        Ok(found.into_iter().map(|(key, value)| (rest(&prefix, &key), value.bytes)).collect())
    }
}

/// The part of a key after its directory.
fn rest(prefix: &str, key: &str) -> String {
    key.strip_prefix(prefix).unwrap_or_default().to_owned()
}
